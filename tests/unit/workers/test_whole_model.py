"""A run that trains the whole model, in both dialects: what the library's own model does, and through snapshots."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from harness.called_engine import Called
from harness.host_reads import HostReads
from harness.journal import Bench
from harness.training import make_rows
from harness.twinkle_calls import CalledRun
from harness.worker import Killed, MakeWorker
from twinkle.core.adapter import AdapterConfig, Dialect
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.operation import OperationState
from twinkle.core.settings import Settings
from twinkle.model import TransformersModel
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.model.script_state import Script
from twinkle.module.lora import LoraConfig
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.calls import Call
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.wire.training_result import ForwardBackwardResult
from twinkle.workers.engine import Pass
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.process import build_engine

ROWS = [{name: row[name] for name in ("input_ids", "labels")} for row in make_rows(0)]
WHOLE = AdapterConfig(base_model="tiny", rank=0, seed=0, dialect=Dialect.TWINKLE)
TINKER = WHOLE.model_copy(update={"dialect": Dialect.TINKER})
POLICY = {"advantages": [0.5, -1.0, 2.0, 0.25], "old_logps": [-3.0, -4.0, -2.0, -5.0]}


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> TransformersEngine:
    settings = Settings(model=str(model_dir), model_name="tiny", threads=1, tokens_per_pass=48, serves="whole-model")
    return TransformersEngine.from_settings(settings)


def _set_up(called: Called | TransformersModel, loss: str) -> None:
    call = called if isinstance(called, Called) else lambda name, **arguments: getattr(called, name)(**arguments)
    call("set_loss", loss_cls=loss)
    call("set_optimizer", optimizer_cls="AdamW", lr=1e-2)
    call("set_lr_scheduler", scheduler_cls="LinearWarmupScheduler", num_warmup_steps=1, num_training_steps=9)


def _in_pieces(called: Called, **policy: Any) -> float:
    called("forward", inputs=ROWS, **policy)
    loss = called("calculate_loss")
    called("backward")
    for name in ("clip_grad_norm", "step", "zero_grad", "lr_step"):
        called(name)
    return float(loss)


@pytest.mark.parametrize(("loss", "policy"), [("cross_entropy", {}), ("GRPOLoss", POLICY)])
def test_a_run_by_calls_is_that_of_the_librarys_model_and_the_same_bits_parked_between_any_two(
    engine: TransformersEngine, model_dir: Path, loss: str, policy: dict[str, Any]
) -> None:
    called, parked = Called(engine, WHOLE), Called(engine, WHOLE, parks=True)
    torch.set_num_threads(1)
    local = TransformersModel(str(model_dir), mixed_precision="no", gradient_checkpointing=False)
    for each in (called, parked, local):
        _set_up(each, loss)
    tensors = {name: torch.tensor(values) for name, values in policy.items()}

    losses = [_in_pieces(each, **policy) for each in (called, parked) for _ in range(2)]
    expected = []
    for _ in range(2):
        expected.append(float(local.forward_backward(inputs=ROWS, **tensors)["loss"]))
        local.clip_grad_and_step()

    assert losses[:2] == losses[2:]
    assert losses[:2] == pytest.approx(expected, rel=1e-4)
    assert torch.equal(called.params, parked.params)
    own = engine.model.pool.layout.tensors(called.params)
    theirs = dict(local.model.named_parameters())
    assert own.keys() == theirs.keys()
    # Float32 in another order of sums; AdamW's first steps are the sign of a gradient that may be next to nothing.
    assert max(float((own[name] - theirs[name].detach()).abs().median()) for name in own) < 1e-5


def test_the_model_as_it_was_loaded_is_what_every_run_begins_with_and_what_is_asked_without_the_trained(
    engine: TransformersEngine, model_dir: Path
) -> None:
    called = Called(engine, WHOLE)
    before = called("forward_only", inputs=ROWS)["logps"]
    called("set_optimizer", optimizer_cls="SGD", lr=0.1)
    called("forward_backward", inputs=ROWS)
    called("clip_grad_and_step")

    assert called("forward_only", inputs=ROWS)["logps"] != before
    assert called("forward_only", inputs=ROWS, disable_lora=True)["logps"] == before
    assert Called(engine, WHOLE)("forward_only", inputs=ROWS)["logps"] == before
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for name, values in engine.model.pool.layout.tensors(engine.model.pool.base.params).items():
        assert torch.equal(values, plain.get_parameter(name)), name


def test_a_checkpoint_opens_in_plain_transformers_and_goes_on_to_the_same_bits(
    engine: TransformersEngine, tmp_path: Path
) -> None:
    called = Called(engine, WHOLE)
    _set_up(called, "cross_entropy")
    called("forward_backward", inputs=ROWS)
    called("clip_grad_and_step")
    files = engine.export(called.state, with_optimizer=True)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, values in engine.model.pool.layout.tensors(called.params).items():
        assert torch.equal(values, plain.get_parameter(name)), name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)

    resumed = Called(engine, WHOLE)
    _set_up(resumed, "cross_entropy")
    call = Call(method="resume_from_checkpoint", arguments={"name": "x"})
    resumed.state, body = engine.load_into(resumed.state, files, call)
    for each in (called, resumed):
        each("forward_backward", inputs=ROWS)
        each("clip_grad_and_step")

    assert b'"cur_step":1' in body
    assert torch.equal(called.params, resumed.params)
    assert torch.equal(called.script.adapter.exp_avg, resumed.script.adapter.exp_avg)


def _pass(state: Any, *, spoilt: bool = False) -> Pass[Any]:
    data = []
    for row in ROWS:
        tokens = np.array(row["input_ids"], dtype=np.int64)
        weights = np.array([label != -100 for label in row["labels"]], dtype=np.float32)
        targets = np.where(weights > 0, np.array(row["labels"]), 0)
        data.append(WireDatum(tokens, {"target_tokens": targets, "weights": weights}))
    if spoilt:
        data[-1].inputs["weights"][:] = np.inf
    return Pass(state=state, body=ForwardBackwardBody("m", 1, False, "cross_entropy", {}, tuple(data)))


def test_the_tinker_dialect_trains_it_too_and_a_pass_that_fails_leaves_it_as_it_was(
    engine: TransformersEngine,
) -> None:
    state, script = engine.create(TINKER), Called(engine, WHOLE)
    script("set_loss", loss_cls="cross_entropy", reduction="sum")
    (result,) = engine.run_passes([_pass(state)])
    script("forward_backward", inputs=ROWS)
    assert isinstance(result, ForwardBackwardResult)
    assert torch.equal(state.grad, script.grad)  # type: ignore[union-attr]
    kept = engine.snapshot(state)

    (failure,) = engine.run_passes([_pass(state, spoilt=True)])

    assert isinstance(failure, Exception) and "not finite" in str(failure)
    assert engine.snapshot(state) == kept
    metrics = engine.optim_step(state, AdamParams(learning_rate=1e-3))
    again = engine.restore(kept)
    engine.optim_step(again, AdamParams(learning_rate=1e-3))
    assert metrics["step"] == 1.0
    assert engine.snapshot(state) == engine.snapshot(again) != kept
    files = engine.export(state, with_optimizer=True)
    loaded = engine.load(TINKER, files, with_optimizer=True, trainable=True)
    assert engine.snapshot(loaded) == engine.snapshot(state)
    untrained = _pass(engine.create(TINKER))
    as_loaded, own = (
        replace(untrained, state=state, body=replace(untrained.body, forward_only=True, without_adapter=alone))
        for alone in (True, False)
    )
    expected, found, trained = engine.run_passes([untrained, as_loaded, own])
    assert found.logprobs[0].tobytes() == expected.logprobs[0].tobytes() != trained.logprobs[0].tobytes()  # type: ignore[union-attr]


def test_what_a_whole_model_has_not_is_refused_in_words(engine: TransformersEngine, model_dir: Path) -> None:
    called = Called(engine, WHOLE)
    with pytest.raises(InvalidInput, match="train an adapter for it"):
        called("forward", inputs=[{"input_ids": [1, 2], "labels": [1]}], task="embedding")
    with pytest.raises(InvalidInput, match="is this mesh's"):
        called("apply_patch", patch_cls="x")
    adapter = WHOLE.model_copy(update={"rank": 4})
    with pytest.raises(InvalidInput, match="the weights of an adapter, which this mesh does not take"):
        engine.load(adapter, {}, with_optimizer=False, trainable=True)
    with pytest.raises(InvalidInput, match="nothing is sampled on this mesh"):
        engine.freeze(called.state)
    with pytest.raises(ConfigError, match="one rank"):
        build_engine(Settings(model=str(model_dir), serves="whole-model", ranks=2))
    with pytest.raises(ConfigError, match="does not sample"):
        build_engine(Settings(model=str(model_dir), serves="whole-model", sampler="vllm"))


def _train(run: CalledRun) -> int:
    run.call("set_loss", loss_cls="GRPOLoss")
    run.call("set_optimizer", optimizer_cls="AdamW", lr=1e-2)
    run.call("forward_backward", inputs=ROWS, **POLICY)
    run.call("clip_grad_and_step", max_grad_norm=1.0)
    run.call("save", name="x", save_optimizer=True)
    run.call("forward", inputs=ROWS, **POLICY)
    run.call("calculate_loss")
    run.call("backward")
    run.call("step")
    run.call("zero_grad")
    run.call("resume_from_checkpoint", path=f"tinker://{run.adapter}/weights/x")
    run.call("forward_backward", inputs=ROWS, **POLICY)
    return run.call("clip_grad_and_step")


def _die() -> None:
    raise Killed


def test_a_killed_run_of_the_whole_model_ends_with_the_bits_of_an_undisturbed_one(
    bench: Bench, make_worker: MakeWorker
) -> None:
    calm = CalledRun(bench, "calm", config=WHOLE)
    last_seq = _train(calm)
    make_worker(max_attempts=99, max_resident=1).drain()
    bench.stores.adapters.unload("calm", "t0")
    stormy = CalledRun(bench, "stormy", config=WHOLE, tenant="t1")
    _train(stormy)
    for round_ in range(last_seq):
        worker = make_worker(max_attempts=99, max_resident=1)
        worker.drain(round_ % 3)
        setattr(worker.journal, ("after_claim", "before_commit", "after_commit")[round_ % 3], _die)
        with suppress(Killed):
            worker.drain(2)
    last = make_worker(max_attempts=99, max_resident=1)
    last.drain()

    for run in (calm, stormy):
        assert [run.status(seq).state for seq in range(last_seq + 1)] == [OperationState.DONE] * (last_seq + 1)
    assert [calm.body(seq) for seq in (3, 4, 6, 7, 11, 12, 13)] == [
        stormy.body(seq) for seq in (3, 4, 6, 7, 11, 12, 13)
    ]
    (one, two) = (bench.stores.checkpoints.find(f"tinker://{name}/weights/x") for name in ("calm", "stormy"))
    assert {name: file.sha256 for name, file in one.files.items()} == {
        name: file.sha256 for name, file in two.files.items()
    }
    cost = bench.stores.snapshots.cost("stormy")
    state = last.state_before("stormy", last_seq + 1)
    assert (
        isinstance(state, Script) and cost.snapshot_bytes >= cost.num_snapshots * 12 * state.adapter.params.numel() > 0
    )


@pytest.mark.parametrize("lengths", [(9,), (9, 9, 5), (3, 4, 5, 6)])
def test_a_pass_reads_as_much_back_for_many_datums_as_for_one(
    engine: TransformersEngine, lengths: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    data = tuple(
        Datum(
            rng.integers(3, 40, length),
            {"target_tokens": rng.integers(3, 40, length), "weights": np.ones(length, np.float32)},
        )
        for length in lengths
    )
    copy = engine.model.create_adapter(LoraConfig(rank=0))
    with HostReads() as reads:
        (outcome,) = engine.model.forward_backward([TrainJob(copy, data, "cross_entropy")])
    assert isinstance(outcome, TrainOutcome), outcome
    # What came out of the pass, and whether the gradient is finite; the rest are transformers' own masks.
    assert reads.counts["cpu"] == 1
    assert reads.counts["tolist"] == 1
    assert reads.counts["__float__"] == reads.counts["item"] == 0
