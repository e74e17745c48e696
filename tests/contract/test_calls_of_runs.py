"""Runs of the Twinkle dialect through the worker: each call exactly once, in order, whatever dies; its JSON its result.

The engine computes nothing; its state is a chain over all that was ever called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from harness.clock import HandClock
from harness.journal import Bench
from harness.operations import forward_backward, optim_step, replayed, submit_run
from harness.twinkle_calls import CalledRun, row
from harness.worker import Killed, MakeWorker, WorkerRig
from twinkle.core.operation import OperationState


@pytest.fixture
def bench(sqlite_url: str, clock: HandClock) -> Iterator[Bench]:
    """One database is enough here: the contract of both is tested next door."""
    bench = Bench(sqlite_url, clock)
    yield bench
    bench.close()


@pytest.fixture
def run(bench: Bench) -> CalledRun:
    return CalledRun(bench)


def _drain(worker: WorkerRig) -> None:
    for _ in range(20):
        worker.drain()
        worker.clock.move(60)


def _train(run: CalledRun) -> None:
    """A script: settings, steps in one call and in pieces, a save, an evaluation."""
    run.call("set_optimizer", optimizer_cls="AdamW", lr=1e-3)
    run.call("forward_backward", inputs=[row(1, 2, 3)])
    run.call("clip_grad_and_step")
    run.call("forward", inputs=[row(4, 5)])
    run.call("calculate_loss")
    run.call("backward")
    run.call("clip_grad_norm", max_grad_norm=1.0)
    run.call("step")
    run.call("zero_grad")
    run.call("lr_step")
    run.call("save", name="x", save_optimizer=True, consumed_train_samples=7)
    run.call("forward_only", inputs=[row(6)])
    run.call("forward_backward", inputs=[row(7, 8)])
    run.call("step")
    run.call("calculate_metric", is_training=True)


def test_results_are_the_bodies_of_the_responses(run: CalledRun, make_worker: MakeWorker) -> None:
    _train(run)

    make_worker().drain()

    assert all(run.status(seq).state is OperationState.DONE for seq in range(len(run.calls)))
    assert run.body(1) is None
    result = run.body(2)["result"]
    assert result["logps"] == [[0.0, 0.0, 0.0]] and result["logits"] is None
    assert isinstance(result["loss"], float) and result["num_tokens"] == 3
    assert isinstance(run.body(5)["result"], float)
    assert run.body(6) is None
    assert isinstance(run.body(7)["result"], str)
    assert run.body(8) is None
    assert run.body(11) == {"twinkle_path": "twinkle://a/weights/x", "checkpoint_dir": "twinkle://a/weights/x"}
    assert run.body(15)["result"]["iters"] == 3


@pytest.mark.parametrize("when", ["after_claim", "before_commit", "after_commit"])
def test_a_worker_killed_at_any_moment_changes_no_answer(
    bench: Bench, run: CalledRun, make_worker: MakeWorker, when: str
) -> None:
    undisturbed = CalledRun(bench, "b", tenant="t1")
    _train(undisturbed)
    make_worker().drain()
    _train(run)
    for batches in range(len(run.calls)):
        worker = make_worker(max_attempts=100)
        worker.drain(batches)
        setattr(worker.journal, when, _die)
        with suppress(Killed):
            worker.drain()

    last = make_worker()
    _drain(last)

    told = [str(run.body(seq)).replace("//a/", "//b/") for seq in range(1, len(run.calls))]
    assert told == [str(undisturbed.body(seq)) for seq in range(1, len(run.calls))]
    assert last.state_before("a", len(run.calls)) == last.state_before("b", len(run.calls))


@pytest.mark.parametrize("max_resident", [1, 8])
def test_a_run_of_each_dialect_train_beside_each_other(
    bench: Bench, run: CalledRun, make_worker: MakeWorker, max_resident: int
) -> None:
    requests = submit_run(bench, *[forward_backward(1), optim_step()] * 6, adapter="t")
    _train(run)
    worker = make_worker(max_resident=max_resident)

    worker.drain()

    truth, _ = replayed(requests)
    state = worker.state_before("t", len(requests))
    assert (state.applied, state.steps) == (truth.applied, truth.steps)
    assert run.body(15)["result"]["iters"] == 3
    assert max(worker.engine.batch_sizes) == min(max_resident, 2)


def test_a_step_whose_window_holds_a_failed_pass_fails_and_says_which(run: CalledRun, make_worker: MakeWorker) -> None:
    run.call("forward_backward", inputs=[row(1, 2)])
    bad = run.call("forward_backward", inputs=[])
    step = run.call("clip_grad_and_step")
    run.call("forward_backward", inputs=[row(1, 2)])
    again = run.call("clip_grad_and_step")
    worker = make_worker()

    worker.drain()

    assert run.failure(bad).startswith("invalid_input: inputs")
    assert run.failure(step).startswith("window_failed: ") and f"operation {bad} " in run.failure(step)
    assert run.status(again).state is OperationState.DONE
    assert worker.state_before("a", len(run.calls)).steps == 1


def test_clearing_the_gradients_makes_up_for_a_failed_pass(run: CalledRun, make_worker: MakeWorker) -> None:
    run.call("forward_backward", inputs=[])
    run.call("zero_grad")
    run.call("forward_backward", inputs=[row(1, 2)])
    step = run.call("step")

    make_worker().drain()

    assert run.status(step).state is OperationState.DONE


@pytest.mark.parametrize("rejection", [None, "too many tokens"])
def test_a_backward_never_takes_the_pass_before_the_one_that_failed(
    bench: Bench, run: CalledRun, make_worker: MakeWorker, rejection: str | None
) -> None:
    run.call("forward", inputs=[row(1, 2)])
    run.call("forward", inputs=[row(3)] if rejection else [], rejection=rejection)
    live = run.call("backward")
    make_worker().drain()
    replayed_later = run.call("backward")

    make_worker().drain()

    assert "call forward first" in run.failure(live)
    assert "call forward first" in run.failure(replayed_later)


def test_a_checkpoint_is_loaded_resumed_and_saved_under_its_name_again(run: CalledRun, make_worker: MakeWorker) -> None:
    run.call("forward_backward", inputs=[row(1, 2)])
    run.call("step")
    run.call("save", name="x", save_optimizer=True, consumed_train_samples=7)
    run.call("forward_backward", inputs=[row(3)])
    run.call("step")
    load = run.call("load", path="tinker://a/weights/x", load_optimizer=True, content=None, grant=None)
    run.call("forward_backward", inputs=[row(3)])
    run.call("step")
    again = run.call("save", name="x", is_sampler=False)
    sampler = run.call("save", name="y", is_sampler=True)
    resume = run.call("resume_from_checkpoint", path="tinker://a/weights/x", resume_only_model=True)
    missing = run.call("load", path="tinker://a/weights/nothing")
    first = make_worker()

    first.drain()

    assert run.body(load) is None
    assert run.status(again).state is OperationState.DONE
    assert run.body(sampler)["twinkle_path"] == "twinkle://a/sampler_weights/y"
    found = run.body(resume)["result"]
    assert found == {"cur_step": 0, "consumed_train_samples": 7, "gradient_accumulation_steps": 1}
    assert "there is no checkpoint" in run.failure(missing)
    here = first.state_before("a", len(run.calls))
    assert here == make_worker().state_before("a", len(run.calls))


def _die() -> None:
    raise Killed
