"""API keys by their ids, on both databases."""

from __future__ import annotations

import pytest

from harness.journal import Bench
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.scopes import ALL_SCOPES, Scope, read_scopes


def test_a_key_is_found_by_its_beginning_and_by_itself_and_tells_all_but_itself(bench: Bench) -> None:
    key = bench.stores.tenants.create_key("alice", "laptop", scopes=frozenset({Scope.READ}))
    [info] = bench.stores.keyring.all(tenant="alice")

    assert bench.stores.keyring.find(info.id[:6]) == bench.stores.keyring.find(key) == info
    assert (info.tenant, info.name, info.scopes, info.last_used_at) == ("alice", "laptop", (Scope.READ,), None)
    with pytest.raises(NotFound, match="keys list"):
        bench.stores.keyring.find("no such id")


def test_a_beginning_that_two_keys_share_names_neither(bench: Bench) -> None:
    for _ in range(17):
        bench.stores.tenants.create_key("alice", "one of many")
    beginnings = [info.id[0] for info in bench.stores.keyring.all()]
    shared = next(one for one in beginnings if beginnings.count(one) > 1)

    with pytest.raises(Conflict, match="give more of it"):
        bench.stores.keyring.find(shared)
    with pytest.raises(NotFound):
        bench.stores.keyring.find("")


def test_a_use_is_noted_to_the_minute(bench: Bench) -> None:
    key = bench.stores.tenants.create_key("alice", "laptop")
    bench.stores.tenants.key(key)
    first = bench.stores.keyring.find(key).last_used_at
    bench.clock.move(10)
    bench.stores.tenants.key(key)
    soon = bench.stores.keyring.find(key).last_used_at
    bench.clock.move(60)
    bench.stores.tenants.key(key)

    assert first is not None and first == soon
    assert bench.stores.keyring.find(key).last_used_at == first + 70


def test_a_key_with_an_end_opens_nothing_after_it_and_stays_in_the_list(bench: Bench) -> None:
    key = bench.stores.tenants.create_key("alice", "for a day", expires_at=bench.clock.now() + 86_400)
    assert bench.stores.tenants.key(key) is not None

    bench.clock.move(86_401)

    assert bench.stores.tenants.key(key) is None
    bench.stores.tenants.lend_key(bench.stores.tenants.all()[0].id, "a job's", expires_at=bench.clock.now() + 60)
    assert [info.name for info in bench.stores.keyring.all(tenant="alice")] == ["for a day"]


def test_a_rotated_key_is_replaced_by_one_that_may_as_much_and_ends_when_its_grace_is_over(bench: Bench) -> None:
    old = bench.stores.tenants.create_key("alice", "laptop", scopes=frozenset({Scope.READ, Scope.SAMPLE}))
    info, new = bench.stores.keyring.rotate(bench.stores.keyring.find(old).id, grace_s=3600)

    assert (info.name, frozenset(info.scopes)) == ("laptop", {Scope.READ, Scope.SAMPLE})
    assert bench.stores.tenants.key(old) is not None and bench.stores.tenants.key(new) is not None
    bench.clock.move(3601)
    assert bench.stores.tenants.key(old) is None and bench.stores.tenants.key(new) is not None
    with pytest.raises(Conflict, match="has ended"):
        bench.stores.keyring.rotate(old)


def test_a_revoked_key_opens_nothing_and_is_told_to_whoever_remembers_it(bench: Bench) -> None:
    key = bench.stores.tenants.create_key("alice", "laptop")
    info = bench.stores.keyring.revoke(bench.stores.keyring.find(key).id)

    assert bench.stores.tenants.key(key) is None
    assert info.revoked_at == bench.clock.now()
    assert info.id in bench.stores.tenants.ended_since(bench.clock.now() - 1)
    assert info.id not in bench.stores.tenants.ended_since(bench.clock.now() + 1)


def test_scopes_are_words_and_reading_is_always_among_them() -> None:
    assert read_scopes(["train", "sample"]) == ALL_SCOPES
    assert read_scopes(["sample"]) == {Scope.SAMPLE, Scope.READ}
    with pytest.raises(InvalidInput, match="'write' is none"):
        read_scopes(["write"])
