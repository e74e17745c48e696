"""What a database cannot hold harms whoever sent it at most: nobody who is written with it, and no loop for ever."""

from __future__ import annotations

import numpy as np
import pytest

from harness.journal import Bench, submission
from harness.operations import forward_backward, optim_step, replayed, submit_run
from harness.worker import MakeWorker, WorkerRig
from twinkle.core.errors import InvalidInput, StatementFailed
from twinkle.core.operation import OperationState, Payload, Submission
from twinkle.storage.database import Database
from twinkle.wire.training import ForwardBackwardBody, WireDatum, write_forward_backward

TEXTS = {"nul": "a\x00b", "half_of_a_pair": "a\ud800b"}
"""PostgreSQL takes the first nowhere, no driver sends the second."""

for_each_text = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)


def _with_input(adapter: str, seq: int, name: str) -> Submission:
    """A pass with a tensor of no known type under a name of the client's choice."""
    tokens = np.array([1, 2])
    body = ForwardBackwardBody(
        model_id=adapter,
        seq_id=seq,
        forward_only=False,
        loss_fn="cross_entropy",
        loss_fn_config={},
        data=(WireDatum(tokens, {"target_tokens": tokens}),),
    )
    message = write_forward_backward(body)
    message.data[0].loss_fn_inputs[name].dtype = 3
    message.data[0].loss_fn_inputs[name].dense = b"\x01"
    return submission(adapter, seq, body=message.SerializeToString(), num_tokens=2)


def _fail_passes_of(worker: WorkerRig, adapter: str, error: Exception) -> None:
    run_passes = worker.engine.run_passes

    def fail(passes):  # type: ignore[no-untyped-def]
        answers = run_passes(passes)
        return [
            error if item.body.model_id == adapter else answer for item, answer in zip(passes, answers, strict=True)
        ]

    worker.engine.run_passes = fail  # type: ignore[method-assign]


def _assert_unharmed(bench: Bench, worker: WorkerRig, adapter: str, *requests) -> None:  # type: ignore[no-untyped-def]
    statuses = [bench.status(adapter, seq) for seq in range(len(requests))]
    assert [(status.state, status.attempt) for status in statuses] == [(OperationState.DONE, 1)] * len(requests)
    truth, _ = replayed(requests)
    state = worker.state_before(adapter, len(requests))
    assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)


def test_a_name_that_no_text_column_takes_fails_the_pass_that_brought_it_and_no_other(
    bench: Bench, make_worker: MakeWorker
) -> None:
    submit_run(bench, adapter="a")
    run = submit_run(bench, forward_backward(1), adapter="b")
    bench.append(_with_input("a", 1, TEXTS["nul"]))
    worker = make_worker()

    worker.drain()

    failure = bench.status("a", 1).failure
    assert failure is not None and (failure.category, failure.code) == ("user", "invalid_input")
    assert failure.message.startswith("data[0].loss_fn_inputs.a\ufffdb")
    _assert_unharmed(bench, worker, "b", *run)


@for_each_text
def test_what_an_error_says_is_told_as_far_as_it_can_be_written(
    bench: Bench, make_worker: MakeWorker, text: str
) -> None:
    runs = {adapter: submit_run(bench, forward_backward(1), adapter=adapter) for adapter in "ab"}
    worker = make_worker()
    _fail_passes_of(worker, "a", InvalidInput(f"data[0].{text}", "is none"))

    worker.drain()

    failure = bench.status("a", 1).failure
    assert failure is not None and failure.category == "user"
    assert failure.message.startswith("data[0].a") and failure.message.endswith("b: is none")
    _assert_unharmed(bench, worker, "b", *runs["b"])


@for_each_text
def test_a_rejection_is_accepted_whatever_it_quotes(bench: Bench, text: str) -> None:
    for adapter in "ab":
        submit_run(bench, adapter=adapter)

    rejection = InvalidInput(text, "is none").message
    refused, other = bench.append(submission("a", 1, rejection=rejection), submission("b", 1))

    assert refused.is_new and other.is_new  # type: ignore[union-attr]


def test_outcomes_that_cannot_be_recorded_end_alone_and_those_beside_them_are_recorded(
    bench: Bench, make_worker: MakeWorker
) -> None:
    """Whatever it is that the journal does not take of one adapter, and however it came there."""
    requests = forward_backward(1), optim_step()
    runs = {adapter: submit_run(bench, *requests, adapter=adapter) for adapter in "abc"}
    worker = make_worker()
    worker.drain(1)
    before = worker.state_before("b", 1)
    store_pass = worker.worker._endings.store_pass

    def store(claim, result):  # type: ignore[no-untyped-def]
        if claim.lane == "a":
            return Payload(inline=None, blob="a\ud800b", blob_bytes=1)
            yield
        return (yield from store_pass(claim, result))

    object.__setattr__(worker.worker._endings, "store_pass", store)
    worker.drain()

    failure = bench.status("a", 1).failure
    assert failure is not None and failure.code == StatementFailed.code and "incident" in failure.message
    assert bench.status("a", 1).attempt == 1
    step = bench.status("a", 2).failure
    assert step is not None and step.code == "window_failed"
    for adapter in "bc":
        _assert_unharmed(bench, worker, adapter, *runs[adapter])
    assert worker.state_before("b", 3) is before, "nothing of it was made anew"


@pytest.mark.parametrize("together", [False, True], ids=["one_by_one", "together"])
def test_a_text_that_the_driver_cannot_send_is_a_statement_that_failed(bench: Bench, together: bool) -> None:
    text = TEXTS["half_of_a_pair"]

    def write() -> None:
        with bench.database.transaction(together=together) as transaction:
            transaction.execute("INSERT INTO mesh (name, epoch, expires_at) VALUES (?, 0, 0)", ("m",))
            transaction.execute("UPDATE mesh SET epoch = 2 WHERE name = ?", (text,))

    for attempt in (write, lambda: bench.database.read("SELECT name FROM mesh WHERE name = ?", (text,))):
        with pytest.raises(StatementFailed, match="mesh"):
            attempt()
    assert bench.rows("SELECT COUNT(*) AS number FROM mesh") == [(0,)]


def test_so_is_a_number_that_sqlite_has_no_room_for(sqlite_url: str) -> None:
    database = Database(sqlite_url)

    with pytest.raises(StatementFailed, match="SELECT name FROM mesh"):
        database.read("SELECT name FROM mesh WHERE epoch = ?", (1 << 80,))

    database.close()
