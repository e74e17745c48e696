"""Calls on a tiny real model: the same bits as the local class, whatever comes in between and whoever shares a pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from harness.called_engine import Called, twinkle_config
from harness.training import make_rows
from twinkle.core.adapter import AdapterConfig
from twinkle.core.errors import CallFailed, InvalidInput
from twinkle.model import MultiLoraTransformersModel
from twinkle.model.fused.script_pass import ScriptPass
from twinkle.model.fused.training import TrainOutcome
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.calls import Call
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import CallAnswer, Pass
from twinkle.workers.engines.transformers_engine import TransformersEngine

ROWS = [{name: row[name] for name in ("input_ids", "labels")} for row in make_rows(0)]
WIDTH = max(len(row["input_ids"]) for row in ROWS)


def _trained(row: dict[str, Any]) -> int:
    return sum(label != -100 for label in row["labels"])


def _numbers(seed: int, *shape: int) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) * 0.3 - 3).astype(np.float32).tolist()


RAGGED = [_numbers(index, _trained(row)) for index, row in enumerate(ROWS)]
POLICY = {"advantages": [0.5, -1.0, 2.0, 0.25], "old_logps": RAGGED}
TEACHER = {
    "teacher_topk_logprobs": [_numbers(index, len(row["input_ids"]), 3) for index, row in enumerate(ROWS)],
    "teacher_topk_indices": np.random.default_rng(3).integers(0, 280, (len(ROWS), WIDTH, 3)).tolist(),
}

LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CrossEntropyLoss": ({"reduction": "sum"}, {}),
    "cross_entropy": ({"dft": True}, {}),
    "ChunkedCrossEntropyLoss": ({"chunk_size": 4}, {}),
    "LigerFusedLinearCrossEntropyLoss": ({}, {}),
    "GRPOLoss": ({"beta": 0.1}, {**POLICY, "ref_logps": RAGGED}),
    "gspo": ({}, POLICY),
    "SAPOLoss": ({}, POLICY),
    "CISPOLoss": ({}, POLICY),
    "BNPOLoss": ({}, POLICY),
    "dr_grpo": ({}, POLICY),
    "PPOLoss": ({}, POLICY),
    "DPOLoss": ({"sft_weight": 0.2}, {"ref_outputs": {"logps": _numbers(8, len(ROWS), WIDTH)}}),
    "SimPOLoss": ({}, {}),
    "CPOLoss": ({}, {}),
    "ORPOLoss": ({}, {}),
    "GKDLoss": ({}, TEACHER),
    "InfonceLoss": ({"temperature": 0.2}, {"task": "embedding"}),
}


@pytest.fixture(scope="module")
def local_model(model_dir: Path) -> MultiLoraTransformersModel:
    torch.set_num_threads(1)
    return MultiLoraTransformersModel(model_id=str(model_dir), max_loras=64, max_r=16, tokens_per_pass=48)


@pytest.fixture
def local(local_model: MultiLoraTransformersModel) -> MultiLoraTransformersModel:
    for name in list(local_model.optimizer_group):
        local_model.remove_adapter(name)
    return local_model


def _rows_for(loss: str) -> list[dict[str, Any]]:
    if loss != "InfonceLoss":
        return ROWS
    return [{"input_ids": row["input_ids"], "labels": [int(index % 2 == 0)]} for index, row in enumerate(ROWS)]


def _set_up(called: Called, loss: str) -> None:
    called("set_loss", loss_cls=loss, **LOSSES[loss][0])
    called("set_optimizer", optimizer_cls="AdamW", lr=1e-2)
    called("set_lr_scheduler", scheduler_cls="LinearWarmupScheduler", num_warmup_steps=1, num_training_steps=9)
    called("add_metric", metric_cls="GRPOMetric" if "old_logps" in LOSSES[loss][1] else "LossMetric", is_training=True)


def _step_at_once(called: Called, loss: str) -> Any:
    result = called("forward_backward", inputs=_rows_for(loss), **LOSSES[loss][1])
    called("clip_grad_and_step", max_grad_norm=1.0)
    return result


def _step_in_pieces(called: Called, other: Called, loss: str) -> Any:
    found = called("forward", inputs=_rows_for(loss), **LOSSES[loss][1])
    other("forward_backward", inputs=ROWS[:2])
    found["loss"] = called("calculate_loss")
    other("step")
    called("backward")
    called("clip_grad_norm", max_grad_norm=1.0, norm_type=2)
    called("step")
    called("zero_grad")
    called("lr_step")
    return found


def _other(engine: TransformersEngine) -> Called:
    other = Called(engine, twinkle_config(seed=7, rank=2))
    other("set_optimizer", optimizer_cls="SGD", lr=0.1, momentum=0.9)
    return other


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_in_pieces_and_parked_between_is_the_step_at_once_and_the_local_one(
    engine: TransformersEngine, local: MultiLoraTransformersModel, loss: str
) -> None:
    at_once, in_pieces = Called(engine), Called(engine, parks=True)
    start = at_once.params.clone()
    for called in (at_once, in_pieces):
        _set_up(called, loss)
    other = _other(engine)
    told = [_step_at_once(at_once, loss) for _ in range(3)]
    pieces = [_step_in_pieces(in_pieces, other, loss) for _ in range(3)]

    assert torch.equal(at_once.params, in_pieces.params)
    assert not torch.equal(at_once.params, start)
    for whole, piece in zip(told, pieces, strict=True):
        assert whole["loss"] == piece["loss"]
        assert whole["logps"] == piece["logps"]
    mine, theirs = (called("calculate_metric", is_training=True) for called in (at_once, in_pieces))
    drop = ("speed", "total time elapse")
    assert {k: v for k, v in mine.items() if k not in drop} == {k: v for k, v in theirs.items() if k not in drop}

    local.add_adapter_to_model("x", peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    local._adapters["x"].params.copy_(start)
    local._adapters["x"].publish()
    local.set_loss(loss, **LOSSES[loss][0])
    local.set_optimizer("AdamW", lr=1e-2)
    local.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=1, num_training_steps=9)
    keywords = {
        name: torch.tensor(value) if name == "teacher_topk_indices" else value
        for name, value in LOSSES[loss][1].items()
    }
    if loss == "GKDLoss":
        padded = [torch.tensor(row) for row in TEACHER["teacher_topk_logprobs"]]
        keywords["teacher_topk_logprobs"] = torch.nn.utils.rnn.pad_sequence(padded, batch_first=True)
    for whole in told:
        output = local.forward_backward(inputs=_rows_for(loss), **keywords)
        assert output["loss"] == pytest.approx(whole["loss"], rel=0)
        local.clip_grad_and_step(1.0)
    assert torch.equal(local._adapters["x"].params, at_once.params)


def _tinker_pass(engine: TransformersEngine, seed: int, loss: str = "importance_sampling") -> Pass[Any]:
    rng = np.random.default_rng(seed)
    inputs = {
        "target_tokens": rng.integers(8, 200, 20),
        "logprobs": rng.normal(-5, 1, 20).astype(np.float32),
        "advantages": rng.normal(size=20).astype(np.float32),
    }
    body = ForwardBackwardBody("m", 1, False, loss, {}, (WireDatum(rng.integers(8, 200, 20), inputs),))
    return Pass(state=engine.create(AdapterConfig(base_model="tiny", rank=4, seed=seed)), body=body)


def test_passes_of_both_dialects_share_device_passes_and_each_has_the_bits_it_has_alone(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [loss for loss in LOSSES if loss != "InfonceLoss"]
    together, alone = ([Called(engine, twinkle_config(seed=9)) for _ in names] for _ in range(2))
    for called, loss in [*zip(together, names, strict=True), *zip(alone, names, strict=True)]:
        _set_up(called, loss)
    tinker, tinker_alone = _tinker_pass(engine, 1), _tinker_pass(engine, 1)
    one_by_one = [
        called("forward_backward", inputs=ROWS, **LOSSES[loss][1]) for called, loss in zip(alone, names, strict=True)
    ]
    [of_tinker_alone] = engine.run_passes([tinker_alone])
    rounds: list[int] = []
    run = engine.model._run_jobs
    monkeypatch.setattr(engine.model, "_run_jobs", lambda jobs: rounds.append(len(jobs)) or run(jobs))

    answers = engine.run_passes(
        [
            tinker,
            *(
                called.as_pass("forward_backward", inputs=ROWS, **LOSSES[loss][1])
                for called, loss in zip(together, names, strict=True)
            ),
        ]
    )

    assert len(rounds) == 2 and rounds[1] == len(names) + 1
    of_tinker = answers[0]
    assert np.array_equal(of_tinker.logprobs[0], of_tinker_alone.logprobs[0])  # type: ignore[union-attr]
    assert torch.equal(tinker.state.grad, tinker_alone.state.grad)
    for answer, told, called, lonely in zip(answers[1:], one_by_one, together, alone, strict=True):
        assert isinstance(answer, CallAnswer)
        assert json.loads(answer.body)["result"] == told
        assert torch.equal(called.grad, lonely.grad)


def test_what_is_wrong_with_one_pass_once_it_has_run_is_told_of_that_one_and_brings_its_adapter_back(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, alone, broken = (Called(engine, twinkle_config(seed=9)) for _ in range(3))
    for called in (healthy, alone, broken):
        _set_up(called, "CrossEntropyLoss")
    told = alone("forward_backward", inputs=ROWS)
    tinker, tinker_alone = _tinker_pass(engine, 1), _tinker_pass(engine, 1)
    [of_tinker_alone] = engine.run_passes([tinker_alone])
    take = ScriptPass.take

    def break_off(fused: ScriptPass, outcome: TrainOutcome) -> None:
        if fused.group is broken.script.group:
            raise KeyError("a column")
        take(fused, outcome)

    monkeypatch.setattr(ScriptPass, "take", break_off)
    passes = [called.as_pass("forward_backward", inputs=ROWS) for called in (broken, healthy)]

    failed, answer, of_tinker = engine.run_passes([*passes, tinker])

    assert isinstance(failed, CallFailed) and "a column" in failed.message
    assert isinstance(answer, CallAnswer) and json.loads(answer.body)["result"] == told
    assert torch.equal(healthy.grad, alone.grad)
    assert np.array_equal(of_tinker.logprobs[0], of_tinker_alone.logprobs[0])  # type: ignore[union-attr]


def test_a_window_of_two_passes_steps_once_and_parking_in_it_changes_nothing(engine: TransformersEngine) -> None:
    straight, parked = (Called(engine, twinkle_config(steps=2), parks=parks) for parks in (False, True))
    for called in (straight, parked):
        _set_up(called, "CrossEntropyLoss")
        start = called.params.clone()
        called("forward_backward", inputs=ROWS[:2])
        assert called("clip_grad_norm") == "None"
        called("step")
        called("zero_grad")
        assert torch.equal(called.params, start) and called.script.adapter.has_gradients
        called("forward_backward", inputs=ROWS[2:])
        called("clip_grad_and_step")
        called("forward_backward", inputs=ROWS[2:])
        called("forward_backward", inputs=ROWS[2:])
        called("clip_grad_and_step")

    assert torch.equal(straight.params, parked.params)
    assert not torch.equal(straight.params, start)


def test_a_failed_window_is_cleared_whole(engine: TransformersEngine) -> None:
    called = Called(engine, twinkle_config(steps=2))
    called("set_optimizer", optimizer_cls="AdamW", lr=1e-2)
    called("forward_backward", inputs=ROWS[:2])
    engine.clear_gradients(called.state)
    start = called.params.clone()
    called("forward_backward", inputs=ROWS[:2])
    called("clip_grad_and_step")

    assert torch.equal(called.params, start)
    assert called.script.group.num_open == 1


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("set_loss", {"loss_cls": "GRPOLos"}, "did you mean GRPOLoss?"),
        ("set_loss", {"loss_cls": "Nothing"}, "use one of"),
        ("set_loss", {"loss_cls": "GRPOLoss", "epsilom": 1}, "cannot be built with these settings"),
        ("set_loss", {"loss_cls": "ms://org/name@v1"}, "approved by id and revision"),
        ("set_loss", {"loss_cls": {"code": "x"}}, "must be the name"),
        ("set_optimizer", {"optimizer_cls": "AdamX"}, "did you mean Adam"),
        ("set_optimizer", {"optimizer_cls": "AdamW", "lr": -1}, "Invalid learning rate"),
        ("set_lr_scheduler", {"scheduler_cls": "CosineWarmup"}, "did you mean CosineWarmupScheduler?"),
        ("set_template", {"template_cls": "Qwen3_5Templat"}, "did you mean Qwen3_5Template?"),
        ("set_template", {"template_cls": "Template", "model_id": "other/model"}, "is of the model served, tiny"),
        ("set_processor", {"processor_cls": "InputProcesor"}, "did you mean InputProcessor?"),
        ("add_metric", {"metric_cls": "LossMetrik"}, "did you mean LossMetric?"),
        ("apply_patch", {"patch_cls": "NoopPatch"}, "all tenants of this mesh"),
        ("calculate_loss", {}, "needs a forward pass"),
        ("backward", {}, "needs a forward pass"),
        ("step", {"nonsense": 1}, "nonsense"),
        ("forward_backward", {"inputs": []}, "inputs"),
        ("forward_backward", {"inputs": [{"messages": []}]}, "set_template"),
        ("forward_backward", {"inputs": [ROWS[0], {"input_ids": [10**6], "labels": [1]}]}, r"inputs\[1\].input_ids"),
        ("forward_backward", {"inputs": [ROWS[0], {"input_ids": [1], "labels": [10**6]}]}, r"inputs\[1\].labels"),
        ("forward_only", {"inputs": [ROWS[0], {"input_ids": [-1], "labels": [1]}]}, r"inputs\[1\].input_ids"),
        ("forward_backward", {"inputs": ROWS, "temperature": 2.0}, "temperature"),
        ("forward_backward", {"inputs": ROWS, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ("forward_only", {"inputs": ROWS, "return_logits": True}, "return_logits"),
        (
            "forward_backward",
            {"inputs": [{"messages": [{"role": "user", "content": [{"type": "image", "url": "/etc/passwd"}]}]}]},
            "no path is read",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_words_and_changes_nothing(
    engine: TransformersEngine, method: str, arguments: dict[str, Any], words: str
) -> None:
    called = Called(engine)
    if method == "set_lr_scheduler" or method == "step":
        called("set_optimizer")
    before = engine.snapshot(called.state)

    with pytest.raises(Exception, match=words.replace("?", r"\?")) as refusal:
        called(method, **arguments)

    assert getattr(refusal.value, "code", "") in ("invalid_input", "call_failed")
    assert _without_times(engine, called.state) == _without_times(engine, engine.restore(before))


def test_a_plugin_that_the_operator_has_approved_is_trained_with_and_survives_parking(
    engine: TransformersEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from twinkle.loss import CrossEntropyLoss\n\n\nclass Own(CrossEntropyLoss):\n    pass\n"
    (tmp_path / "__init__.py").write_text(code)
    theirs, ours = Called(engine, parks=True), Called(engine)

    with pytest.raises(InvalidInput, match="approved by id and revision") as refused:
        theirs("set_loss", loss_cls=f"ms://{tmp_path}#Own")
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", str(tmp_path))
    theirs("set_loss", loss_cls=f"ms://{tmp_path}#Own", reduction="sum")
    ours("set_loss", loss_cls="CrossEntropyLoss", reduction="sum")

    assert "TWINKLE_TRUST" not in refused.value.message
    assert theirs("forward_backward", inputs=ROWS) == ours("forward_backward", inputs=ROWS)
    assert torch.equal(theirs.grad, ours.grad) and ours.grad.any()


def _without_times(engine: TransformersEngine, state: Any) -> str:
    packed = json.dumps(state.pack().content)
    return packed.partition('"accumulated"')[0] + str(engine.fingerprint(state))


def test_keywords_that_a_loss_cannot_take_are_their_client_s_to_mend(engine: TransformersEngine) -> None:
    called = Called(engine)
    called("set_loss", loss_cls="GRPOLoss")

    with pytest.raises(InvalidInput, match="old_logps"):
        called("forward_backward", inputs=ROWS, advantages=[1.0] * 4, old_logps=[[1.0, 2.0]] * 4)
    with pytest.raises(InvalidInput, match="cannot be computed"):
        called("forward_backward", inputs=ROWS, advantages=3)

    assert not called.script.adapter.has_gradients
    assert called.script.group.cur_step == 0


def test_conversations_are_encoded_by_the_mesh_s_own_tokenizer(engine: TransformersEngine) -> None:
    called = Called(engine, parks=True)
    called("set_template", template_cls="Template", model_id="ms://tiny", max_length=64)
    conversation = {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]}

    result = called("forward_backward", inputs=[conversation])

    assert len(result["logps"]) == 1 and result["num_tokens"] > 0 and result["logits"] is None


def test_the_base_model_alone_is_a_free_reference(engine: TransformersEngine) -> None:
    called = Called(engine)
    called("set_optimizer", lr=0.1)
    fresh = called("forward_only", inputs=ROWS)["logps"]
    called("forward_backward", inputs=ROWS)
    called("clip_grad_and_step")

    assert called("forward_only", inputs=ROWS)["logps"] != fresh
    assert called("forward_only", inputs=ROWS, disable_lora=True)["logps"] == fresh


def test_a_checkpoint_goes_on_bit_by_bit_and_the_other_dialect_goes_on_from_it(engine: TransformersEngine) -> None:
    called = Called(engine)
    _set_up(called, "GRPOLoss")
    for _ in range(2):
        _step_at_once(called, "GRPOLoss")
    called("save", name="x", consumed_train_samples=12)
    files = engine.export(called.state, with_optimizer=True)
    fresh = Called(engine, twinkle_config(seed=3))
    _set_up(fresh, "GRPOLoss")
    resumed, body = engine.load_into(fresh.state, files, Call(method="resume_from_checkpoint", arguments={}))
    again = Called(engine, state=resumed)
    for each in (called, again):
        _step_at_once(each, "GRPOLoss")

    found = {"cur_step": 2, "consumed_train_samples": 12, "gradient_accumulation_steps": 1}
    assert json.loads(body) == {"result": found}
    assert torch.equal(again.params, called.params)
    assert not torch.equal(fresh.params, called.params)
    tinker = engine.load(AdapterConfig(base_model="tiny", rank=4, seed=1), files, with_optimizer=True, trainable=True)
    assert tinker.step == 2 and tinker.exp_avg.any()  # type: ignore[union-attr]
    engine.run_passes([Pass(state=tinker, body=_tinker_pass(engine, 1).body)])
    engine.optim_step(tinker, AdamParams(learning_rate=1e-3))
    back, _ = engine.load_into(
        called.state,
        engine.export(tinker, with_optimizer=True),
        Call(method="load", arguments={"load_optimizer": True}),
    )
    assert torch.equal(back.adapter.params, tinker.params)  # type: ignore[union-attr]
    assert torch.equal(back.adapter.exp_avg, tinker.exp_avg)  # type: ignore[union-attr]
    assert next(iter(back.group.optimizer.state.values()))["step"] == 3  # type: ignore[union-attr]


def test_an_optimizer_without_moments_of_adam_is_parked_and_resumed_too(engine: TransformersEngine) -> None:
    straight, parked = Called(engine), Called(engine, parks=True)
    for called in (straight, parked):
        called("set_optimizer", optimizer_cls="SGD", lr=0.1, momentum=0.9)
        for _ in range(3):
            called("forward_backward", inputs=ROWS)
            called("clip_grad_and_step")
    resumed, _ = engine.load_into(
        parked.state,
        engine.export(parked.state, with_optimizer=True),
        Call(method="resume_from_checkpoint", arguments={}),
    )
    last = Called(engine, state=resumed)
    for called in (straight, last):
        called("forward_backward", inputs=ROWS)
        called("clip_grad_and_step")

    assert torch.equal(straight.params, last.params)


def test_a_checkpoint_opens_in_plain_peft(engine: TransformersEngine, model_dir: Path, tmp_path: Path) -> None:
    called = Called(engine)
    called("set_optimizer", lr=0.1)
    called("forward_backward", inputs=ROWS)
    called("clip_grad_and_step")
    for name, content in engine.export(called.state, with_optimizer=True).items():
        (tmp_path / name).write_bytes(content)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path)
    row = ROWS[0]

    logits = model(input_ids=torch.tensor([row["input_ids"]])).logits
    wanted = torch.log_softmax(logits, -1)[0].gather(-1, torch.tensor(row["labels"]).clamp(min=0)[:, None])[:, 0]

    found = called("forward_only", inputs=[row])["logps"][0]
    assert found == pytest.approx(wanted.tolist(), abs=1e-4)


def test_a_config_is_peft_s_and_keys_of_other_versions_are_passed_over(engine: TransformersEngine) -> None:
    called = Called(
        engine, twinkle_config(target_modules=["q_proj"], use_rslora=True, lora_dropout=0.1, of_the_future={"x": 1})
    )

    config = called.script.adapter.config
    assert config.use_rslora and config.rank == 4 and config.alpha == 8
    assert {shape.path.rpartition(".")[2] for shape in called.script.adapter.layout.shapes} == {"q_proj"}
    with pytest.raises(InvalidInput, match="nothing_like_it"):
        engine.create(twinkle_config(target_modules=["nothing_like_it"]))
    with pytest.raises(InvalidInput, match="use_dora"):
        engine.create(twinkle_config(use_dora=True))


@pytest.mark.parametrize("pattern", ["(a+)+$", "(x|x)*y", ".*.*.*.*q", "a" * 600, "q_proj["])
def test_a_pattern_that_could_be_matched_for_ever_is_refused(engine: TransformersEngine, pattern: str) -> None:
    with pytest.raises(InvalidInput, match="send a list of names"):
        engine.create(twinkle_config(target_modules=pattern))


def test_a_pattern_names_layers_as_peft_s_does(engine: TransformersEngine) -> None:
    called = Called(engine, twinkle_config(peft_type="LORA", target_modules=r".*\.(q_proj|v_proj)"))

    trained = {shape.path.rpartition(".")[2] for shape in called.script.adapter.layout.shapes}
    assert trained == {"q_proj", "v_proj"}
