"""Results are written beside the device, while it goes on; one that cannot be is its own operation's failure."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.journal import Bench
from harness.lookahead import STEPS, WAIT_S, assert_as_one_by_one, column, once_in_a_pass
from harness.operations import submit_run
from harness.worker import MakeWorker
from twinkle.core.operation import Claim, OperationKind, Payload
from twinkle.wire.training_result import ForwardBackwardResult, encode_forward_backward_output
from twinkle.workers.endings import Execution


def test_results_are_brought_into_wire_form_while_the_device_goes_on(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the first pass waits until the device is at the second: it can only be if neither waits for it."""
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    is_at_second, overlapped = threading.Event(), []
    once_in_a_pass(worker, is_at_second.set, nth=2)

    def encode(result: ForwardBackwardResult) -> bytes:
        overlapped.append(is_at_second.wait(WAIT_S))
        return encode_forward_backward_output(result)

    monkeypatch.setattr("twinkle.workers.recording.encode_forward_backward_output", encode)

    worker.drain()

    assert overlapped == [True] * 3
    assert_as_one_by_one(worker, bench, run)


def test_a_result_that_cannot_be_written_is_an_attempt_that_failed(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has gone on with what follows on it: that goes back, and everything is done anew, once."""
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=2, clerk=beside)
    worker.drain(1)
    is_at_second, failed = threading.Event(), []
    once_in_a_pass(worker, is_at_second.set, nth=2)

    def encode(result: ForwardBackwardResult) -> bytes:
        assert is_at_second.wait(WAIT_S)
        if not failed:
            failed.append(result)
            raise ValueError("not today")
        return encode_forward_backward_output(result)

    monkeypatch.setattr("twinkle.workers.recording.encode_forward_backward_output", encode)
    worker.drain()
    assert column(bench.stores, "state", range(1, 7)) == ["queued"] * 6

    bench.clock.move(1000)
    worker.drain()

    assert_as_one_by_one(worker, bench, run)
    assert column(bench.stores, "attempts", range(1, 7)) == [2, 1, 1, 1, 1, 1]


def test_what_ended_together_with_a_result_that_cannot_be_written_goes_back_from_there_on(
    bench: Bench, make_worker: MakeWorker
) -> None:
    """As where a large result was being stored while what follows on it ended."""
    worker = make_worker()
    execution, endings = Execution(), worker.worker._endings
    bad = ForwardBackwardResult((), {"unnamed": 1.0})
    for seq, result in enumerate((Payload(inline=b"1"), Payload(inline=b"2"), bad, Payload(inline=b"4")), start=1):
        claim = Claim(
            request_id=f"a:req:{seq}",
            tenant="t0",
            lane="a",
            seq=seq,
            kind=OperationKind.FORWARD_BACKWARD,
            payload=Payload(inline=b""),
            attempt=1,
            num_tokens=0,
            accepted_at=0.0,
            rejection=None,
            failed_window_seq=None,
        )
        execution.begun[claim.request_id] = (claim, 0.0)
        endings.succeed(execution, claim, result, device_s=0.0, num_tokens=0, charge=1)

    assert worker.worker._recorder._write_results(execution) == {"a"}

    assert [outcome.seq for outcome in execution.outcomes] == [1, 2]
    assert [postponed.claim.seq for postponed in execution.postponed] == [3]
    assert [claim.seq for claim in execution.returned] == [4]
