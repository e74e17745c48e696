"""A script on a real engine through the worker: killed, evicted, beside others, it ends as if nothing had happened."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch

from harness.called_engine import twinkle_config
from harness.journal import Bench
from harness.training import make_rows
from harness.twinkle_calls import CalledRun
from harness.worker import Killed, MakeWorker
from twinkle.core.adapter import WARNINGS
from twinkle.core.operation import OperationState
from twinkle.model.script_state import Script
from twinkle.scheduler.retention import Retention

ROWS = [{name: row[name] for name in ("input_ids", "labels")} for row in make_rows(0)]
NUM_CALLS = 21


def _train(run: CalledRun) -> None:
    policy = {"advantages": [0.5, -1.0, 2.0, 0.25], "inputs": ROWS}
    run.call("set_loss", loss_cls="GRPOLoss")
    run.call("set_optimizer", optimizer_cls="AdamW", lr=1e-2)
    run.call("set_lr_scheduler", scheduler_cls="CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=9)
    run.call("add_metric", metric_cls="GRPOMetric", is_training=True)
    run.call("forward_backward", **policy, old_logps=[-3.0, -4.0, -2.0, -5.0])
    run.call("clip_grad_and_step", max_grad_norm=1.0)
    run.call("forward_only", inputs=ROWS, disable_lora=True)
    run.call("forward", **policy)
    run.call("calculate_loss")
    run.call("backward")
    run.call("clip_grad_norm", max_grad_norm=1.0)
    run.call("step")
    run.call("zero_grad")
    run.call("lr_step")
    run.call("save", name="x", save_optimizer=True, consumed_train_samples=8)
    run.call("calculate_metric", is_training=True)
    run.call("set_loss", loss_cls="cross_entropy")
    run.call("forward_backward", inputs=ROWS)
    run.call("clip_grad_and_step")
    run.call("forward_backward", inputs=ROWS)
    run.call("step")


def _die() -> None:
    raise Killed


@pytest.mark.parametrize("max_resident", [1, 8])
def test_a_killed_and_evicted_script_ends_with_the_bits_of_an_undisturbed_one(
    bench: Bench, make_worker: MakeWorker, max_resident: int
) -> None:
    undisturbed = CalledRun(bench, "calm", config=twinkle_config())
    _train(undisturbed)
    make_worker().drain()
    run, neighbour = (CalledRun(bench, name, config=twinkle_config(), tenant="t1") for name in ("a", "b"))
    for each in (run, neighbour):
        _train(each)
    moments = ("after_claim", "before_commit", "after_commit")
    for batches in range(NUM_CALLS):
        worker = make_worker(max_attempts=1000, max_resident=max_resident)
        worker.drain(batches % 5)
        setattr(worker.journal, moments[batches % 3], _die)
        with suppress(Killed):
            worker.drain(2)

    last = make_worker(max_attempts=1000, max_resident=max_resident)
    for _ in range(10):
        last.drain()
        last.clock.move(60)

    for each in (run, neighbour):
        assert all(each.status(seq).state is OperationState.DONE for seq in range(NUM_CALLS + 1))
        assert [each.body(seq) for seq in range(1, NUM_CALLS + 1) if seq not in (15, 16)] == [
            undisturbed.body(seq) for seq in range(1, NUM_CALLS + 1) if seq not in (15, 16)
        ]
    calm, stormy = (last.state_before(name, NUM_CALLS + 1) for name in ("calm", "a"))
    assert isinstance(calm, Script) and isinstance(stormy, Script)
    for name in ("params", "exp_avg", "exp_avg_sq", "grad"):
        assert torch.equal(getattr(calm.adapter, name), getattr(stormy.adapter, name))
    assert calm.group.position() == stormy.group.position()
    assert calm.group.learning_rates() == stormy.group.learning_rates()


def test_a_script_put_back_between_its_step_and_its_zero_grad_goes_on_without_the_gradients_of_that_step(
    bench: Bench, make_worker: MakeWorker
) -> None:
    put_back, calm = (CalledRun(bench, name, config=twinkle_config()) for name in ("back", "calm"))
    for run in (put_back, calm):
        run.call("set_optimizer", optimizer_cls="SGD", lr=0.1)
        run.call("forward_backward", inputs=ROWS)
        stepped_seq = run.call("step")
    for name in ("forward_backward", "step", "zero_grad"):
        put_back.call(name, **({"inputs": ROWS[:2]} if name == "forward_backward" else {}))
    worker = make_worker(retention=Retention(keep_s=1e12, every_ops=1, max_snapshots=9))
    worker.drain()
    bench.stores.branches.rewind("back", "t0", at=stepped_seq, request_key=None)
    calm.call("zero_grad")
    seqs = {}
    for run in (put_back, calm):
        run.call("forward_backward", inputs=ROWS)
        seqs[run.adapter] = run.call("step")
    worker.drain()

    assert put_back.status(seqs["back"]).state is OperationState.DONE
    one, two = (worker.state_before(run.adapter, seqs[run.adapter] + 1) for run in (calm, put_back))
    assert isinstance(one, Script) and isinstance(two, Script)
    assert torch.equal(one.adapter.params, two.adapter.params) and torch.equal(one.adapter.grad, two.adapter.grad)


def test_what_is_not_applied_of_a_run_s_config_is_told_with_its_settings(bench: Bench, make_worker: MakeWorker) -> None:
    run, other = (CalledRun(bench, name, config=twinkle_config()) for name in ("a", "b"))
    with bench.database.transaction() as transaction:
        said = json.dumps({WARNINGS: "lora_dropout=0.05 is not applied: why\nbias='all' is not applied: why"})
        transaction.execute("UPDATE adapter SET user_metadata = ? WHERE id = 'a'", (said,))
    seqs = [each.call("get_train_configs") for each in (run, other)]
    make_worker().drain()

    shown, plain = (each.body(seq)["result"] for each, seq in zip((run, other), seqs, strict=True))
    assert shown == f"{plain}\nwarning: lora_dropout=0.05 is not applied: why\nwarning: bias='all' is not applied: why"
