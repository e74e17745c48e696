"""What a script says to a Megatron model, on one rank."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from harness.training import make_rows
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.infra import DeviceMesh
from twinkle.infra.process_group import leave_world
from twinkle.model import TransformersModel
from twinkle.model.megatron import MegatronModel
from twinkle.model.megatron.layout import leave_layout

LAYERS = 4


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    yield
    leave_layout()
    leave_world()


def make(families_dir: Path, family: str = "qwen3", **settings: Any) -> MegatronModel:
    return MegatronModel(model_id=str(families_dir / family), **settings)


def test_a_keyword_that_is_not_ours_reaches_megatrons_config(families_dir: Path) -> None:
    model = make(families_dir, attention_softmax_in_fp32=False, params_dtype="float64", pipeline_dtype="float64")

    assert model.config.attention_softmax_in_fp32 is False
    assert {weight.dtype for stage in model.pipeline.stages for weight in stage.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tensor_model_parallel_size": 2}, "is said by the device mesh; give it tp_size"),
        ({"use_cpu_initialization": False}, "is set by MegatronModel itself"),
        ({"params_dtype": "bfloat61"}, "is no dtype of torch's"),
        ({"ddp_config": {"overlap_grad_reduc": True}}, "ddp_config.overlap_grad_reduc: .*did you mean overlap_grad_re"),
        ({"variable_seq_lengths": False}, "rows go through the stages as long as they are"),
        ({"recompute_granularity": "some"}, "Megatron refuses these settings"),
    ],
)
def test_a_wrong_keyword_is_named_with_the_nearest(
    settings: dict[str, Any], complaint: str, families_dir: Path
) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        make(families_dir, **settings)


def test_a_keyword_that_nobody_knows_is_named_with_the_nearest(families_dir: Path) -> None:
    with capture_logs() as logs:
        make(families_dir, recompute_granularty="full", attention_softmax_in_fp23=True)

    assert [(line["keyword"], line["next"]) for line in logs if line["event"] == "keyword.without_effect"] == [
        ("recompute_granularty", "did you mean recompute_granularity?"),
        ("attention_softmax_in_fp23", "did you mean attention_softmax_in_fp32?"),
    ]


def test_a_family_that_is_not_known_is_refused_with_those_that_are(families_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(families_dir / "qwen2", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))

    with pytest.raises(ConfigError, match=r"its type is gpt_neox, MegatronModel knows .*qwen3.*TransformersModel"):
        MegatronModel(model_id=str(tmp_path / "other"))


def test_a_process_keeps_one_layout(families_dir: Path) -> None:
    make(families_dir)

    with pytest.raises(ConfigError, match="processes were started"):
        make(families_dir, device_mesh=DeviceMesh.from_sizes(dp_size=2, device_type="cpu"))


def test_weights_in_bfloat16_are_stepped_through_float32_copies(families_dir: Path) -> None:
    model = make(families_dir, mixed_precision="bf16")
    model.set_optimizer("MegatronOptimizer", lr=1e-5)
    before = model.get_state_dict()

    for step in range(2):
        model.forward_backward(inputs=make_rows(step))
        model.clip_grad_and_step()

    after = model.get_state_dict()
    masters = model.group("").parameters
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert {master.dtype for master in masters.values()} == {torch.float32}
    # Steps too small for bfloat16's digits add up in the copies.
    stood_still = [name for name in before if torch.equal(before[name], after[name])]
    assert stood_still and len(stood_still) < len(before)


@pytest.mark.parametrize("family", ["qwen3", "tied"])
def test_megatron_goes_on_where_transformers_stopped_within_a_window(
    family: str, families_dir: Path, tmp_path: Path
) -> None:
    alone = TransformersModel(model_id=str(families_dir / family), gradient_checkpointing=False)
    model = make(families_dir, family)
    for each in (alone, model):
        each.set_optimizer("AdamW", lr=1e-2)
        each.group("").set_accumulation(2)
    for step in range(3):
        alone.forward_backward(inputs=make_rows(step))
        alone.clip_grad_and_step()
    half = alone.save("half", output_dir=tmp_path, save_optimizer=True)
    assert half

    progress = model.resume_from_checkpoint(half)

    assert progress["cur_step"] == 3
    norms = []
    for each in (alone, model):
        each.forward_backward(inputs=make_rows(3))
        norms.append(each.clip_grad_and_step())
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    state = alone.get_state_dict()
    for name, value in model.get_state_dict().items():
        torch.testing.assert_close(value, state[name], atol=2e-3, rtol=1e-2)


def test_weights_may_be_drawn_anew(families_dir: Path) -> None:
    read, drawn = make(families_dir).get_state_dict(), make(families_dir, load_weights=False).get_state_dict()

    assert read.keys() == drawn.keys()
    assert not torch.equal(read["model.layers.0.mlp.up_proj.weight"], drawn["model.layers.0.mlp.up_proj.weight"])


def test_megatrons_schedule_warms_up_and_decays(families_dir: Path) -> None:
    model = make(families_dir)
    model.set_optimizer("default", lr=1e-3, weight_decay=0.1)
    model.set_lr_scheduler("default", lr_decay_steps=4, max_lr=2e-3, lr_warmup_steps=2, lr_decay_style="linear")
    rates = []

    for _ in range(5):
        rates.append(model.group("").learning_rates()[0])
        model.lr_step()

    assert rates == pytest.approx([0.0, 1e-3, 2e-3, 1e-3, 0.0])
    optimizer = model.group("").optimizer
    assert optimizer is not None
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_schedule_that_is_none_says_what_it_takes(families_dir: Path) -> None:
    model = make(families_dir)
    model.set_optimizer()

    with pytest.raises(InvalidInput, match="lr_warmup_steps < lr_decay_steps"):
        model.set_lr_scheduler("OptimizerParamScheduler", lr_decay_steps=2, lr_warmup_steps=3)
    with pytest.raises(InvalidInput, match="lr_decay_style"):
        model.set_lr_scheduler("default", lr_decay_steps=2, lr_decay_style="square")


def test_what_the_passes_do_not_take_is_refused(families_dir: Path) -> None:
    model = make(families_dir)
    rows = make_rows(0)

    with pytest.raises(InvalidInput, match="task"):
        model.forward_only(inputs=rows, task="embedding")
    with pytest.raises(InvalidInput, match="position_ids"):
        model.forward_only(inputs=[{**rows[0], "position_ids": list(range(3, 3 + len(rows[0]["input_ids"])))}])
    with pytest.raises(InvalidInput, match="there is no adapter"):
        model.forward_only(inputs=rows, disable_lora=True)
    with pytest.raises(InvalidInput, match="have no labels"):
        model.forward_backward(inputs=[{"input_ids": [1, 2, 3]}])


def test_an_evaluation_has_its_loss_without_being_asked_for_it(families_dir: Path) -> None:
    """As scripts by Megatron take it; those by transformers call ``calculate_loss``."""
    rows = make_rows(0)
    model, alone = make(families_dir), TransformersModel(model_id=str(families_dir / "qwen3"))

    for row in rows:
        model.forward_only(inputs=[row])
        alone.forward_only(inputs=[row])
        alone.calculate_loss()

    ours, theirs = (each.calculate_metric(is_training=False)["loss"] for each in (model, alone))
    # LossMetric has four digits.
    assert float(ours) == pytest.approx(float(theirs), abs=2e-4)


def test_a_patch_sees_the_stages_of_this_rank(families_dir: Path) -> None:
    seen: list[torch.nn.Module] = []

    make(families_dir).apply_patch(seen.append)

    assert [len(stage.decoder.layers) for stages in seen for stage in stages.children()] == [LAYERS]
