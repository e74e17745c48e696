"""Weights access tokens: what one opens, when it ends, and that what was accepted with it does not end with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.clock import HandClock
from harness.journal import CONFIG, Bench, digest
from harness.operations import optim_step, save, submit_run
from harness.worker import Killed, MakeWorker
from twinkle.core.adapter import Checkpoint, CheckpointKind, Grant, StoredFile
from twinkle.core.errors import LimitReached, NotFound
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.storage.checkpoints import access_tokens
from twinkle.storage.checkpoints.access_tokens import AccessTokens
from twinkle.storage.checkpoints.checkpoints import NewCopy
from twinkle.storage.journal.records import Records

HOUR_S = 3600.0
PATH = "tinker://a/weights/x"


@pytest.fixture
def tokens(bench: Bench, clock: HandClock) -> AccessTokens:
    return bench.stores.access_tokens


def _checkpoint(path: str = PATH, *, seq: int = 1, listed: bool = True, expires_at: float | None = None) -> Checkpoint:
    run, _, name = path.removeprefix("tinker://").split("/")
    return Checkpoint(
        path=path,
        tenant="t0",
        adapter=run,
        kind=CheckpointKind.TRAINING,
        name=name,
        seq=seq,
        config=CONFIG,
        files={"state.json": StoredFile(key=f"checkpoints/{run}/{name}/{seq}", size_bytes=1, sha256=str(seq))},
        created_at=0.0,
        expires_at=expires_at,
        listed=listed,
    )


def _publish(bench: Bench, lease: Lease, *checkpoints: Checkpoint) -> None:
    """Put checkpoints into the journal as a save does."""
    with bench.database.transaction() as transaction:
        Records(checkpoints=list(checkpoints)).insert(transaction, bench.clock.now())


@pytest.fixture
def owned(bench: Bench, lease: Lease) -> Lease:
    """Tenant ``t0`` has runs ``a`` and ``b``, each with a checkpoint ``x``."""
    bench.created(lease, "a", "b")
    _publish(bench, lease, _checkpoint(), _checkpoint("tinker://b/weights/x"))
    return lease


def _opens(tokens: AccessTokens, secret: str, path: str = PATH, *, reader: str = "t1") -> bool:
    return tokens.grant(secret, path, reader=reader, purpose="load") is not None


def test_a_token_of_a_checkpoint_opens_this_one_and_a_token_of_a_run_all_that_it_lists(
    bench: Bench, owned: Lease, tokens: AccessTokens
) -> None:
    _publish(
        bench, owned, _checkpoint("tinker://a/weights/y", seq=2), _checkpoint("tinker://a/weights/z", listed=False)
    )
    one = tokens.issue_for_checkpoint(PATH, tenant="t0", name="bob", ttl_s=HOUR_S)
    all_of_a = tokens.issue_for_run("a", tenant="t0", name="", ttl_s=HOUR_S)
    paths = [PATH, "tinker://a/weights/y", "tinker://a/weights/z", "tinker://b/weights/x", "tinker://a/weights/absent"]

    assert [_opens(tokens, one.secret, path) for path in paths] == [True, False, False, False, False]
    assert [_opens(tokens, all_of_a.secret, path) for path in paths] == [True, True, False, False, False]
    assert not _opens(tokens, one.secret, reader="t0"), "owners need none"
    assert not _opens(tokens, one.token.id) and not _opens(tokens, "")
    granted = tokens.grant(one.secret, PATH, reader="t1", purpose="load")
    meant = bench.checkpoints.find(PATH).content
    assert granted == Grant(token=one.token.id, owner="t0", run="a", content=meant)
    assert bench.checkpoints.find(PATH, tenant="t1", grant=granted).path == PATH
    with pytest.raises(NotFound):
        bench.checkpoints.find("tinker://a/weights/y", tenant="t1", grant=granted)


def test_a_token_ends_with_its_time_and_when_it_is_revoked(
    bench: Bench, owned: Lease, tokens: AccessTokens, clock: HandClock
) -> None:
    short, long, revoked = (tokens.issue_for_run("a", tenant="t0", name="", ttl_s=ttl) for ttl in (1, 2, 3 * HOUR_S))
    before = [_opens(tokens, issued.secret) for issued in (short, long, revoked)]
    first, again = (tokens.revoke(revoked.token.id, tenant="t0") for _ in range(2))
    clock.move(1)
    after = [_opens(tokens, issued.secret) for issued in (short, long, revoked)]

    assert (before, after) == ([True] * 3, [False, True, False])
    assert first.revoked_at == again.revoked_at == clock.now() - 1
    assert {token.id for token in tokens.all(tenant="t0", run="a")} == {long.token.id, revoked.token.id}
    clock.move(1)
    assert bench.upkeep.expire_access_tokens() == 2
    assert bench.rows("SELECT id FROM access_token") == [(revoked.token.id,)]


def test_a_token_of_a_checkpoint_opens_no_other_that_takes_its_name(
    bench: Bench, owned: Lease, tokens: AccessTokens
) -> None:
    issued = tokens.issue_for_checkpoint(PATH, tenant="t0", name="", ttl_s=HOUR_S)
    of_run = tokens.issue_for_run("a", tenant="t0", name="", ttl_s=HOUR_S)
    _publish(bench, owned, _checkpoint())
    unchanged = _opens(tokens, issued.secret)
    _publish(bench, owned, _checkpoint(seq=7))
    replaced = _opens(tokens, issued.secret), _opens(tokens, of_run.secret)
    bench.checkpoints.delete("t0", PATH)
    deleted = _opens(tokens, issued.secret), _opens(tokens, of_run.secret)
    _publish(bench, owned, _checkpoint(seq=9))

    assert unchanged
    assert (replaced, deleted) == ((False, True), (False, False))
    assert not _opens(tokens, issued.secret)
    assert _opens(tokens, of_run.secret)


def test_an_expired_checkpoint_is_opened_by_nobody(
    bench: Bench, owned: Lease, tokens: AccessTokens, clock: HandClock
) -> None:
    issued = tokens.issue_for_run("a", tenant="t0", name="", ttl_s=HOUR_S)
    bench.checkpoints.set_expiry("t0", PATH, clock.now() + 10)
    before = _opens(tokens, issued.secret)
    clock.move(10)

    assert (before, _opens(tokens, issued.secret)) == (True, False)
    with pytest.raises(NotFound):
        tokens.issue_for_checkpoint(PATH, tenant="t0", name="", ttl_s=HOUR_S)


def test_only_an_owner_issues_lists_and_revokes_and_an_operator_for_everybody(
    owned: Lease, tokens: AccessTokens
) -> None:
    issued = tokens.issue_for_run("a", tenant=None, name="", ttl_s=HOUR_S).token

    refused: list[Callable[[], object]] = [
        lambda: tokens.issue_for_run("a", tenant="t1", name="", ttl_s=HOUR_S),
        lambda: tokens.issue_for_run("absent", tenant="t0", name="", ttl_s=HOUR_S),
        lambda: tokens.issue_for_checkpoint(PATH, tenant="t1", name="", ttl_s=HOUR_S),
        lambda: tokens.issue_for_checkpoint("tinker://a/weights/absent", tenant="t0", name="", ttl_s=HOUR_S),
        lambda: tokens.revoke(issued.id, tenant="t1"),
        lambda: tokens.revoke("absent", tenant="t0"),
    ]
    for attempt in refused:
        with pytest.raises(NotFound):
            attempt()
    assert (tokens.all(tenant="t1"), tokens.all(tenant="t0", run="b")) == ([], [])
    assert tokens.all(tenant="t0") == tokens.all(tenant=None) == [issued]


def test_so_many_tokens_and_no_more(owned: Lease, tokens: AccessTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_tokens, "MAX_TOKENS", 2)
    first, _ = (tokens.issue_for_run("a", tenant="t0", name="", ttl_s=HOUR_S) for _ in range(2))

    with pytest.raises(LimitReached, match="2 may be"):
        tokens.issue_for_run("b", tenant="t0", name="", ttl_s=HOUR_S)
    tokens.revoke(first.token.id, tenant="t0")
    assert tokens.issue_for_run("b", tenant="t0", name="", ttl_s=HOUR_S).token.run == "b"


def test_the_owner_reads_who_used_it_and_nowhere_is_the_token_itself(
    bench: Bench, owned: Lease, tokens: AccessTokens, clock: HandClock
) -> None:
    issued = tokens.issue_for_checkpoint(PATH, tenant="t0", name="bob", ttl_s=HOUR_S)
    _opens(tokens, issued.secret)
    _opens(tokens, issued.secret, "tinker://b/weights/x")
    tokens.revoke(issued.token.id, tenant="t0")
    tokens.revoke(issued.token.id, tenant="t0")
    _opens(tokens, issued.secret)

    entries = bench.stores.audit.entries("t0", start=0, end=clock.now() + 1)

    assert [entry.event for entry in entries] == [
        "checkpoint_token_create",
        "checkpoint_token_use",
        "checkpoint_token_revoke",
    ]
    assert entries[1].details == {
        "tinker_path": PATH,
        "training_run": "a",
        "token_id": issued.token.id,
        "reader": "t1",
        "purpose": "load",
    }
    (listed,) = tokens.all(tenant="t0")
    assert listed.last_used_at == clock.now()
    for table in ("access_token", "audit", "operation"):
        assert issued.secret not in str(bench.rows(f"SELECT * FROM {table}"))


def test_a_copy_needs_leave_and_then_belongs_to_who_made_it(
    bench: Bench, owned: Lease, tokens: AccessTokens, clock: HandClock
) -> None:
    copies = bench.checkpoints
    new = NewCopy(source=PATH, tenant="t1", session="session-t1", adapter="c", expires_at=None)
    elsewhere = Grant(token="x", owner="t0", run="b", content=bench.checkpoints.find("tinker://b/weights/x").content)
    issued = tokens.issue_for_checkpoint(PATH, tenant="t0", name="", ttl_s=HOUR_S)
    grant = tokens.grant(issued.secret, PATH, reader="t1", purpose="copy")

    for bad in (None, elsewhere):
        with pytest.raises(NotFound):
            copies.copy(replace(new, grant=bad))
    path = copies.copy(replace(new, grant=grant))
    tokens.revoke(issued.token.id, tenant="t0")

    assert bench.checkpoints.find(path, tenant="t1").files == bench.checkpoints.find(PATH).files
    assert copies.copy(new) == path, "a resend needs no leave any more"


def _load(lane: str, seq: int, path: str, grant: Grant | None, *, optimizer: bool = False) -> Submission:
    """A load of another run's checkpoint as the API stores it."""
    payload: dict[str, object] = {"path": path, "optimizer": optimizer}
    if grant is not None:
        payload |= {"content": grant.content, "grant": grant.model_dump()}
    body = json.dumps(payload).encode()
    kind = OperationKind.LOAD_WEIGHTS
    return Submission(tenant="t1", lane=lane, seq=seq, kind=kind, digest=digest(body), payload=Payload(inline=body))


def test_an_accepted_load_outlives_its_token_also_when_its_worker_dies(
    bench: Bench, make_worker: MakeWorker, tokens: AccessTokens, clock: HandClock
) -> None:
    submit_run(bench, optim_step(), save("x"), optim_step(), save("y"), adapter="a")
    bench.adapter("mine", tenant="t1")
    first = make_worker()
    first.drain()
    issued = tokens.issue_for_checkpoint(PATH, tenant="t0", name="", ttl_s=60)
    grant = tokens.grant(issued.secret, PATH, reader="t1", purpose="load")
    bench.append(
        _load("mine", 1, PATH, grant, optimizer=True),
        _load("mine", 2, "tinker://a/weights/y", None),
        _load("mine", 3, PATH, None),
        _load("mine", 4, "tinker://a/weights/absent", None),
    )
    tokens.revoke(issued.token.id, tenant="t0")
    clock.move(120)
    bench.upkeep.expire_access_tokens()
    first.journal.before_commit = _die
    with pytest.raises(Killed):
        first.drain()

    second = make_worker()
    second.drain()
    bench.checkpoints.delete("t0", PATH)
    third = make_worker()
    third.drain()

    failures = [bench.status("mine", seq).failure for seq in range(1, 5)]
    assert failures[0] is None
    messages = [failure.message.replace("/x", "/N").replace("/y", "/N").replace("/absent", "/N")
                for failure in failures[1:] if failure is not None]  # fmt: skip
    assert len(messages) == 3 and len(set(messages)) == 1, "not granted is like not there"
    assert third.state_before("mine", 5).steps == 1
    audit = bench.stores.audit.entries("t1", start=0, end=clock.now() + 1)
    assert [entry.details.get("token_id") for entry in audit] == [issued.token.id]


def _die() -> None:
    raise Killed


# -- what shares files with a copy -----------------------------------------------------------------------------------


def test_saving_a_checkpoint_again_unchanged_leaves_its_copies_their_files(
    bench: Bench, owned: Lease, clock: HandClock
) -> None:
    copies = bench.checkpoints
    copy = copies.copy(NewCopy(source=PATH, tenant="t0", session="session-t0", adapter="c", expires_at=None))
    (key,) = (file.key for file in bench.checkpoints.find(PATH).files.values())

    _publish(bench, owned, _checkpoint())
    given_up = bench.checkpoints.delete("t0", PATH)
    last = bench.checkpoints.delete("t0", copy)

    assert (given_up, last) == ([], [key])


def test_a_name_whose_time_is_over_is_free_and_private_again(bench: Bench, owned: Lease, clock: HandClock) -> None:
    bench.checkpoints.set_public("t0", PATH, public=True)
    _publish(bench, owned, _checkpoint())
    still_public = bench.checkpoints.find(PATH).public
    bench.checkpoints.set_expiry("t0", PATH, clock.now() + 10)
    clock.move(10)

    for attempt in (
        lambda: bench.checkpoints.set_public("t0", PATH, public=False),
        lambda: bench.checkpoints.set_expiry("t0", PATH, None),
    ):
        with pytest.raises(NotFound):
            attempt()
    _publish(bench, owned, _checkpoint())

    assert (still_public, bench.checkpoints.find(PATH).public) == (True, False)


def test_the_newest_checkpoint_of_a_run_is_the_newest_of_those_that_are_not_over(
    bench: Bench, owned: Lease, clock: HandClock
) -> None:
    newer = _checkpoint("tinker://a/weights/y", seq=2, expires_at=clock.now() + 10)
    clock.move(1)
    _publish(bench, owned, newer)

    def newest() -> list[str]:
        return [one.path for one in bench.checkpoints.latest(["a"]).values()]

    before = newest()
    clock.move(10)
    assert (before, newest()) == ([newer.path], [PATH])
