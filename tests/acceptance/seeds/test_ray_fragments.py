"""Pieces of the documents that go on from each other, each with the lines alone that it lacks to do something."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from harness.hub_world import HubWorld
from harness.opened_checkpoint import assert_same_in_peft
from harness.script_run import run_script
from harness.seeds import Script
from twinkle.model import TransformersModel

pytest.importorskip("ray", reason="the extra twinkle-queue[ray] is not installed")
# Eight ranks that load Megatron; what a mesh of these axes computes is held in tests/unit/model/megatron.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
TIME_LIMIT_S = 800.0
MODELS = {"000:632": ("000:620", "qwen3_5"), "001:79": ("001:60", "qwen2"), "002:870": ("002:851", "qwen3")}
"""Of a fragment with both models: the one with its groups, and the class of the model that it names."""
ROW = {"input_ids": [5, 6, 7, 8, 9, 10, 11, 12], "labels": [6, 7, 8, 9, 10, 11, 12, 13]}
TRAINED = f"""
from peft import LoraConfig

model.add_adapter_to_model('default', LoraConfig(r=4, target_modules='all-linear'))
model.set_optimizer('default', lr=1e-2)
for _ in range(3):
    print('loss', model.forward_backward(inputs=[{ROW}] * 8)()['loss'])
    model.clip_grad_and_step()
print(twinkle.get_device_placement())
model.save('end')
"""
PLACED = """
import os
import twinkle
from twinkle import DeviceGroup

NUM_GPUS = 3
device_groups = [DeviceGroup(name='model', ranks=2, device_type='GPU'),
                 DeviceGroup(name='sampler', ranks=[2], device_type='GPU')]
{fragment}

@twinkle.remote_class()
class Process:
    @twinkle.remote_function(dispatch='all')
    def number(self):
        return os.getpid()

model, sampler = Process(remote_group='model'), Process(remote_group='sampler')
print('processes', len({{os.getpid(), *model.number(), *sampler.number()}}))
"""


def text_of(scripts: list[Script], name: str) -> str:
    return next(script.text for script in scripts if script.name == name)


@pytest.mark.parametrize("name", MODELS)
def test_of_the_two_models_of_a_fragment_one_says_which_is_meant_and_that_one_trains_on_its_eight_ranks(
    scripts: list[Script], world: HubWorld, tmp_path: Path, name: str
) -> None:
    groups, model_class = MODELS[name]
    one, other = re.split(r"^# (?:Or|或者)$", text_of(scripts, name), flags=re.MULTILINE)
    refused = f"try:\n{textwrap.indent(one, '    ')}except Exception as error:\n    print('refused:', error)\n"

    run = run_script(
        text_of(scripts, groups) + refused + other + TRAINED,
        tmp_path,
        {**world.environment, **RAY},
        time_limit_s=TIME_LIMIT_S,
    )

    base = world.model(model_class)
    assert re.search(r"^refused: .*MegatronModel", run.output, re.MULTILINE), run.output[-3000:]
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)$", run.output, re.MULTILINE)]
    alone = TransformersModel(model_id=str(base), mixed_precision="no")
    whole = alone.forward_backward(inputs=[ROW] * 8)["loss"]
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]
    assert losses[0] == pytest.approx(whole, rel=2e-2), "in bfloat16"
    assert len(re.findall(r"rank \d: node", run.output)) == 8
    assert_same_in_peft(base, tmp_path / "output" / "end")


def test_the_line_that_says_ray_is_all_that_a_script_needs_to_run_there_and_its_calls_give_values(
    scripts: list[Script], world: HubWorld, tmp_path: Path
) -> None:
    fragment = text_of(scripts, "002:379")
    # The script that the document explains by it has it word for word.
    assert fragment.strip() in text_of(scripts, "002:218")

    run = run_script(PLACED.format(fragment=fragment), tmp_path, {**world.environment, **RAY})

    assert "processes 4" in run.output


def test_no_fragment_on_groups_is_left_out(scripts: list[Script]) -> None:
    fragments = {script.name for script in scripts if not script.is_whole and "ray" in script.needs}

    assert fragments == {*MODELS, *(groups for groups, _ in MODELS.values()), "002:379"}
