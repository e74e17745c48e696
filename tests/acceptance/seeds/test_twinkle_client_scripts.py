"""The documents' script of one GPU with `twinkle` read as `twinkle_client`, and one line that says which server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.hub_world import HubWorld
from harness.script_run import run_script
from harness.seeds import Script
from harness.served import Served
from twinkle_client import TwinkleClient
from twinkle_client.sampler import vLLMSampler

from .conftest import SERVED_AS

SCRIPT = "000:60"
ROWS = 160
BATCH = 8
_IMPORT = r"^from twinkle(?=[ .])"
_STEPS = "SELECT COUNT(*) FROM operation WHERE kind = 'optim_step' AND state = 'done'"


def moved(script: Script, url: str, *, stays: str = "") -> str:
    """The script with other import paths, those of modules that match ``stays`` aside, and a line of `init` first."""
    text, count = re.subn(rf"{_IMPORT}(?!{stays or '$'})", "from twinkle_client", script.text, flags=re.MULTILINE)
    assert count >= 2
    text, count = re.subn(r"range\(1000\)", f"range({ROWS})", text)
    assert count == 1
    return f"from twinkle_client import init_twinkle_client\ninit_twinkle_client({url!r})\n{text}"


@pytest.mark.parametrize("stays", [r"\.data", ""], ids=["data sets here", "everything there"])
def test_the_script_of_one_gpu_trains_at_a_server_when_its_import_paths_change(
    service: Served, scripts: list[Script], world: HubWorld, tmp_path: Path, stays: str
) -> None:
    before, steps_before = len(service.query("SELECT name FROM checkpoint")), service.query(_STEPS)[0][0]
    (script,) = [script for script in scripts if script.name == SCRIPT]

    run = run_script(moved(script, service.url, stays=stays), tmp_path, world.environment)

    assert [(told.step, told.steps) for told in run.progress] == [(0, ROWS // BATCH)]
    saved = [name for (name,) in service.query("SELECT name FROM checkpoint")]
    assert len(saved) == before + 1 and "last-checkpoint" in saved[-1]
    assert service.query(_STEPS)[0][0] - steps_before >= ROWS // BATCH


def test_a_conversation_is_continued_piece_by_piece_as_it_is_in_one(service: Served) -> None:
    talk = {"messages": [{"role": "user", "content": "hello"}]}
    with TwinkleClient(service.url) as client:
        sampler = vLLMSampler(f"ms://{SERVED_AS}", connection=client.connection)
        sampler.set_template("Template", model_id=SERVED_AS)
        params = {"max_tokens": 12, "temperature": 0.0}

        pieces = list(sampler.sample_stream(talk, params))
        ((sequence,),) = [response.sequences for response in sampler.sample(talk, params)]

    said = sequence.new_input_feature["messages"][-1]
    assert "".join(delta for delta, _ in pieces) == said["content"]
    assert [reason for _, reason in pieces][-1] == sequence.stop_reason
