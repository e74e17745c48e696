"""Our own client scripts run as they are against a server with a tiny model, and hold what they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from harness.hub_world import HubWorld
from harness.script_run import Run, run_script
from harness.served import Served

from .conftest import SERVED_AS

SCRIPTS = Path(__file__).resolve().parents[3] / "cookbook" / "client" / "twinkle" / "self_host"
RunCookbook = Callable[..., Run]


@pytest.fixture
def run_cookbook(text_service: Served, world: HubWorld, tmp_path: Path) -> RunCookbook:
    """Runs a client script of the cookbook in this test's folder."""

    def run(name: str, *, folder: str = "run", **settings: str) -> Run:
        settings["TWINKLE_SERVER_URL"] = text_service.url
        return run_script((SCRIPTS / name).read_text(), tmp_path / folder, {**world.environment, **settings})

    return run


def saved(run: Run) -> list[str]:
    """The checkpoints that a script says it saved."""
    return re.findall(r"Saved to (twinkle://\S+)", run.output)


def weights(service: Served, path: str) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, as they lie in the object store."""
    ((key,),) = service.query(
        "SELECT json_extract(files, '$.\"adapter_model.safetensors\".key') FROM checkpoint WHERE path = ?",
        path.replace("twinkle://", "tinker://"),
    )
    return safetensors.torch.load_file(service.home / "objects" / str(key))


def test_a_model_learns_its_name_goes_on_to_the_bit_after_a_stop_and_is_asked(
    run_cookbook: RunCookbook, text_service: Served
) -> None:
    few = {"NUM_ROWS": "48", "LEARNING_RATE": "1e-2", "SAVE_EVERY": "6", "LOG_EVERY": "1"}
    whole = run_cookbook("self_congnition.py", **few)
    resumed = run_cookbook("self_congnition.py", folder="resumed", RESUME_FROM=saved(whole)[0], **few)
    asked = run_cookbook("sample.py", folder="asked", ADAPTER_URI=saved(whole)[-1], MAX_NEW_TOKENS="4")

    assert whole.progress[-1].loss < 0.8 * whole.progress[0].loss
    assert [path.rsplit("/", 1)[1] for path in saved(whole)] == ["step-6", "step-12", "last"]
    assert [told.loss for told in whole.progress][6:] == [told.loss for told in resumed.progress]
    one, other = (weights(text_service, saved(run)[-1]) for run in (whole, resumed))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert resumed.progress[0].step == 6
    assert len(re.findall(r"Answer \d \((length|stop)\)", asked.output)) == 2


def test_preferences_widen_between_what_is_preferred_and_what_is_not(run_cookbook: RunCookbook) -> None:
    run = run_cookbook("dpo.py", NUM_ROWS="24", LEARNING_RATE="1e-2", LOG_EVERY="1")

    margins = [float(told.metrics["rewards/margins"]) for told in run.progress]
    assert margins[0] == pytest.approx(0, abs=1e-3) and margins[-1] > margins[0] and len(saved(run)) == 1


def test_short_answers_are_sampled_rewarded_and_learnt_from(run_cookbook: RunCookbook) -> None:
    run = run_cookbook("short_math_grpo.py", NUM_ROWS="16", MAX_STEPS="3", MAX_NEW_TOKENS="8", LEARNING_RATE="1e-3")

    assert len(re.findall(r"Step \d: \{.*'train/total_reward'", run.output)) == 3
    assert saved(run)[-1].endswith("/weights/short-math")


@pytest.mark.soak
def test_sentences_that_belong_together_get_nearer(run_cookbook: RunCookbook) -> None:
    run = run_cookbook("embedding.py", MAX_STEPS="6", LEARNING_RATE="1e-3")

    assert run.progress[-1].loss < 0.9 * run.progress[0].loss and len(saved(run)) == 1
    assert float(run.progress[-1].metrics["pos_sim"]) > float(run.progress[0].metrics["pos_sim"])


@pytest.mark.soak
def test_a_game_in_several_turns_is_played_and_learnt_from(run_cookbook: RunCookbook) -> None:
    run = run_cookbook("multi_turn_rollout.py", MAX_STEPS="2", MAX_NEW_TOKENS="8", LEARNING_RATE="1e-3")

    assert [told.metrics["turns"] >= 1 for told in run.progress] == [True, True] and len(saved(run)) == 1
    # What is said to one deal differs in its length at least, and earns the less the longer it is.
    assert all(float(told.metrics["grad_norm"]) > 0 for told in run.progress)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_formulas_in_pictures_are_learnt_and_asked_about(world: HubWorld, tmp_path: Path) -> None:
    model = world.model("qwen3_5")
    settings = {"NUM_ROWS": "24", "LEARNING_RATE": "1e-2", "LOG_EVERY": "1", "MAX_NEW_TOKENS": "4"}
    with Served(
        tmp_path / "home", model=str(model), model_name=SERVED_AS, flags=("--any-key",), **world.environment
    ) as it:
        settings["TWINKLE_SERVER_URL"] = it.url
        text = (SCRIPTS / "multi_modal.py").read_text()
        run = run_script(text, tmp_path / "run", {**world.environment, **settings})

    assert run.progress[-1].loss < 0.8 * run.progress[0].loss
    assert len(re.findall(r"Picture \d \((length|stop)\): ", run.output)) == 2
