"""The documents' client scripts, word for word against a server on this machine; sizes and addresses alone are set."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.hub_world import HubWorld
from harness.script_run import Run, run_script
from harness.seeds import Script, at_server
from harness.served import Served

from .conftest import BY_ID, SERVED_AS

SIZES = {
    r"data_slice=range\(500\)": "data_slice=range(24)",
    r"MAX_NEW_TOKENS = 1024": "MAX_NEW_TOKENS = 6",
    r"MAX_STEPS = 10": "MAX_STEPS = 8",
}
TINKER = ("000:526", "002:678", "003:186")
GRPO = ("000:318", "002:420")
STEPS, ACCUMULATED = 8, 4

SOME_ARE_REWARDED = """\
import twinkle.reward


class FormatReward:
    def __call__(self, trajectories, ground_truths):
        return [float(sum(row["input_ids"]) % 2) for row in trajectories]


twinkle.reward.FormatReward = FormatReward
"""
"""A tiny model never writes what the documents reward; without differences there is nothing to learn."""

RunClient = Callable[..., Run]


@pytest.fixture
def run_client(scripts: list[Script], world: HubWorld, tmp_path: Path) -> RunClient:
    """Runs a script of the documents against a service, in this test's folder."""
    named = {script.name: script.text for script in scripts}

    def run(service: Served, name: str, *, prelude: str = "") -> Run:
        text = at_server(named[name], service.url, SERVED_AS)
        for written, set_to in SIZES.items():
            text = re.sub(written, set_to, text)
        assert service.url in text and "range(24)" in text
        return run_script(prelude + text, tmp_path, world.environment)

    return run


def counts(service: Served, kind: str, state: str = "done") -> int:
    """Operations of a kind that the journal holds."""
    found = service.query("SELECT COUNT(*) FROM operation WHERE kind = ? AND state = ?", kind, state)
    return int(found[0][0])


def test_the_model_of_a_hub_is_the_one_in_its_cache_and_no_server_is_asked(service: Served, world: HubWorld) -> None:
    owner, name = SERVED_AS.split("/")
    said = "".join(path.read_text() for path in (service.home / "logs").glob("*.log"))

    taken = [line for line in said.splitlines() if "hub.taken" in line and BY_ID in line]
    assert taken and all(str(world.modelscope / "models" / f"{owner}--{name}") in line for line in taken)
    assert "hub.download" not in said


@pytest.mark.parametrize("name", TINKER)
def test_a_script_of_the_sdk_trains_three_epochs(service: Served, run_client: RunClient, name: str) -> None:
    before = counts(service, "optim_step"), counts(service, "save_weights")

    run_client(service, name)

    assert counts(service, "optim_step") - before[0] == 3 * 24 // 8
    assert counts(service, "save_weights") - before[1] == 3


@pytest.mark.parametrize("name", GRPO)
def test_a_script_of_our_client_learns_from_what_it_sampled(
    text_service: Served, run_client: RunClient, name: str
) -> None:
    before = counts(text_service, "forward_backward"), counts(text_service, "optim_step")

    output = run_client(text_service, name, prelude=SOME_ARE_REWARDED).output

    trained = counts(text_service, "forward_backward") - before[0]
    told = re.findall(r"Step \d+: \{.*'train/total_reward'.*\}", output)
    assert len(told) == trained >= ACCUMULATED
    assert counts(text_service, "optim_step") - before[1] == trained
    assert re.search(r"Saved final checkpoint: \S+://\S+/weights/grpo-countdown-final", output)
