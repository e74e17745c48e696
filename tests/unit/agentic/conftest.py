"""A tiny model, its template, and a tool that it cannot help calling."""

from pathlib import Path

import pytest

from harness.models import make_text_model
from twinkle.template import Template
from twinkle_agentic.envs import Env, StepResult

CALL = {"id": "call_0", "type": "function", "function": {"name": "say", "arguments": {}}}


class CallingTemplate(Template):
    """Takes all that is said for a call of the one tool: a model that knows nothing never writes one."""

    def parse_tool_call(self, text):
        function = {"name": "say", "arguments": {"text": text}}
        return [{"id": "call_0", "type": "function", "function": function}]


class VowelEnv(Env):
    """Rewards vowels in each step, and of whole conversations those with few words."""

    def __init__(self, steps=2):
        self._steps = steps
        self._taken = 0
        self.closed = False

    def reset(self, trajectory=None):
        self._taken = 0
        return StepResult(observation="Say something with vowels.")

    def step(self, tool_name, arguments):
        assert tool_name == "say"
        self._taken += 1
        text = arguments["text"]
        vowels = sum(character in "aeiou" for character in text)
        done = self._taken >= self._steps
        return StepResult(observation=f"{vowels} vowels", reward=vowels, done=done)

    def tools(self):
        return [{"type": "function", "function": {"name": "say", "description": "Says it.", "parameters": {}}}]

    def evaluate(self, trajectories, **kwargs):
        return [-float(sum(label >= 0 for label in row["labels"])) for row in trajectories]

    def close(self):
        self.closed = True


@pytest.fixture(scope="session")
def model_id(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_text_model(Path(tmp_path_factory.mktemp("agents")) / "tiny"))


@pytest.fixture
def template(model_id):
    return CallingTemplate(model_id, max_length=400)
