"""Lanes whose operations the journal numbers: in the order of arrival, each request once, in the dialect of the run."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from harness.journal import CONFIG, Bench, digest, new_adapter, submission
from twinkle.core.adapter import Dialect
from twinkle.core.errors import Conflict, InvalidInput, LimitReached, NotFound
from twinkle.core.lease import Lease
from twinkle.core.operation import Accepted, OperationKind, Payload, Unnumbered
from twinkle.storage.adapters.named import AdapterName
from twinkle.storage.journal.branches import fork_of
from twinkle.storage.journal.records import AdapterLimit, NewAdapter

SESSION = "session-t0"
TWINKLE = CONFIG.model_copy(update={"dialect": Dialect.TWINKLE})


def _call(lane: str, body: bytes = b"call", *, key: str | None = None, tenant: str = "t0") -> Unnumbered:
    return Unnumbered(
        tenant=tenant,
        lane=lane,
        kind=OperationKind.FORWARD_BACKWARD,
        digest=digest(body),
        payload=Payload(inline=body),
        request_key=key,
    )


def _first(body: bytes = b"config", *, key: str | None = None, tenant: str = "t0") -> Unnumbered:
    return replace(_call("", body, key=key, tenant=tenant), kind=OperationKind.CREATE_MODEL)


def _new(*, tenant: str = "t0", limit: AdapterLimit | None = None) -> NewAdapter:
    return replace(new_adapter("", tenant=tenant, config=TWINKLE), limit=limit)


def _opened(bench: Bench, name: str = "a", *, body: bytes = b"config", key: str | None = None) -> Accepted:
    return bench.named_adapters.open(_new(), name=name, first=_first(body, key=key))


def _run_of(accepted: Accepted) -> str:
    return accepted.request_id.removesuffix(":req:0")


def _answers(bench: Bench, *calls: Unnumbered) -> list[tuple[str, bool]]:
    answers = bench.journal.append(calls)
    assert all(isinstance(answer, Accepted) for answer in answers), answers
    return [(answer.request_id.rpartition(":")[2], answer.is_new) for answer in answers if isinstance(answer, Accepted)]


def test_calls_are_numbered_as_they_arrive_also_several_of_several_lanes_at_once(bench: Bench, lease: Lease) -> None:
    a, b = _run_of(_opened(bench, "a")), _run_of(_opened(bench, "b"))

    answers = _answers(bench, _call(a), _call(b), _call(a), _call(a, b"other"), _call(b))

    assert answers == [("1", True), ("1", True), ("2", True), ("3", True), ("2", True)]
    assert sorted(bench.run(lease)) == [(a, 0), (a, 1), (a, 2), (a, 3), (b, 0), (b, 1), (b, 2)]


def test_a_call_of_the_same_key_is_the_same_call_and_another_body_under_it_is_refused(
    bench: Bench, lease: Lease
) -> None:
    a, b = _run_of(_opened(bench, "a")), _run_of(_opened(bench, "b"))

    together = _answers(bench, _call(a, key="k"), _call(a, key="k"), _call(b, key="k"))
    bench.run(lease)
    later = _answers(bench, _call(a, key="k"), _call(a, key="next"))
    (refused,) = bench.journal.append([_call(a, b"different", key="k")])

    assert together == [("1", True), ("1", False), ("1", True)]
    assert later == [("1", False), ("2", True)]
    assert isinstance(refused, Conflict)
    assert "idempotency key 'k' was used for a different" in refused.message
    assert "a resend must carry the same body" in refused.message


def test_calls_that_arrive_at_once_by_several_connections_get_a_number_each(bench: Bench) -> None:
    run = _run_of(_opened(bench))
    gate = threading.Barrier(4)
    numbers: list[str] = []

    def send(worker: int) -> None:
        gate.wait()
        for place in range(5):
            numbers.extend(number for number, _ in _answers(bench, _call(run, key=f"{worker}-{place}")))
        bench.database.close()

    threads = [threading.Thread(target=send, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(map(int, numbers)) == list(range(1, 21))


def test_a_run_is_trained_through_the_dialect_that_made_it_and_forked_and_rewound_in_both(
    bench: Bench, lease: Lease
) -> None:
    ours = _run_of(_opened(bench))
    bench.created(lease, "tinkers")
    bench.run(lease)

    by_tinker, by_twinkle, by_a_stranger = bench.journal.append(
        [submission(ours, 1), _call("tinkers"), submission(ours, 1, tenant="t1")]
    )
    rewound = bench.branches.rewind(ours, "t0", at=0, request_key=None)
    after = _answers(bench, _call(ours))

    assert isinstance(by_tinker, InvalidInput)
    assert "made through the Twinkle dialect, and a run is trained through the dialect that made it" in str(by_tinker)
    assert isinstance(by_twinkle, InvalidInput)
    assert "made through the Tinker dialect" in by_twinkle.message
    assert isinstance(by_a_stranger, NotFound)
    assert rewound.request_id == f"{ours}:req:1"
    assert after == [("2", True)]
    assert bench.adapters.unload(ours, "t0").request_id == f"{ours}:req:3"
    assert isinstance(bench.journal.append([_call(ours)])[0], InvalidInput)


def test_a_fork_is_trained_through_the_dialect_that_it_is_made_for(bench: Bench, lease: Lease) -> None:
    ours = _run_of(_opened(bench))
    bench.run(lease)
    source = bench.adapters.find(ours)
    for name, dialect in (("as before", None), ("for the other", Dialect.TINKER)):
        bench.branches.fork(fork_of(source, name, SESSION, now=0.0, dialect=dialect), source=ours, at=0)

    same, other = bench.journal.append([_call("as before"), submission("for the other", 1)])
    refused = bench.journal.append([submission("as before", 1), _call("for the other")])

    assert isinstance(same, Accepted) and isinstance(other, Accepted)
    assert [type(answer) for answer in refused] == [InvalidInput, InvalidInput]
    assert bench.named_adapters.find(AdapterName(text=ours, session=None), tenant="t0").id == ours


def test_an_adapter_is_found_by_its_name_with_and_without_its_session_and_by_its_run(bench: Bench) -> None:
    run = _run_of(_opened(bench, "my adapter"))
    assert run == f"{SESSION}:train:0"
    session = "0b3c9a52-6a3b-4f36-8e0c-2f8f5f1f0a11"

    found = bench.named_adapters.find(AdapterName(text="my adapter", session=SESSION), tenant="t0")
    by_run = bench.named_adapters.find(AdapterName(text=run, session=None), tenant="t0")

    assert found == by_run
    assert (found.id, found.base_model) == (run, CONFIG.base_model)
    assert AdapterName(text=f"{session}-a-b", session="other").parts == (session, "a-b")
    assert bench.named_adapters.name_of(run) == f"{SESSION}-my adapter"
    for name, tenant in (("my adapter", "t1"), ("unheard of", "t0"), (run, "t1")):
        with pytest.raises(NotFound, match="call add_adapter_to_model first"):
            bench.named_adapters.find(AdapterName(text=name, session=SESSION), tenant=tenant)


def test_making_an_adapter_again_answers_the_same_until_the_name_would_mean_something_else(
    bench: Bench, lease: Lease
) -> None:
    first = _opened(bench, key="k")
    again, without_a_key = _opened(bench, key="k"), _opened(bench)
    with pytest.raises(Conflict):
        _opened(bench, body=b"other", key="k")
    bench.run(lease)
    _answers(bench, _call(_run_of(first)))

    assert [first.is_new, again.is_new, without_a_key.is_new] == [True, False, False]
    assert {first.request_id, again.request_id, without_a_key.request_id} == {f"{SESSION}:train:0:req:0"}
    assert not _opened(bench, key="k").is_new
    with pytest.raises(InvalidInput, match="has an adapter 'a' already"):
        _opened(bench)
    bench.adapters.unload(_run_of(first), "t0")
    assert _opened(bench).request_id == f"{SESSION}:train:1:req:0"


def test_a_named_adapter_counts_towards_the_limit_and_needs_a_session_of_its_tenants(bench: Bench) -> None:
    limit = AdapterLimit(max_adapters=1, live_since=-1.0)
    bench.named_adapters.open(_new(limit=limit), name="a", first=_first())

    with pytest.raises(LimitReached):
        bench.named_adapters.open(_new(limit=limit), name="b", first=_first())
    with pytest.raises(NotFound):
        bench.named_adapters.open(replace(_new(), tenant="t1"), name="b", first=_first(tenant="t1"))
    assert bench.rows("SELECT name FROM named_adapter") == [("a",)]
