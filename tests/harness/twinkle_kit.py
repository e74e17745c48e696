"""The package `twinkle-kit` with its own client, in a virtual environment of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.environment import overlaid_python
from harness.sdk_command_line import printed, start_sdk

VERSION = "0.5.1"
REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("twinkle_kit_script.py")
PINNED_SDK = "tinker==0.16.1"
"""What `twinkle-kit[client]` asks for."""
_SDK_SCRIPT = """
import json, sys
from twinkle_client import init_tinker_client

init_tinker_client()
from tinker import ServiceClient, types

url, key, model = sys.argv[1:]
training = ServiceClient(base_url=url, api_key=key).create_lora_training_client(base_model=model, rank=4, seed=1)
inputs = {"target_tokens": [11, 12, 13], "weights": [1.0] * 3}
datum = types.Datum(model_input=types.ModelInput.from_ints([10, 11, 12]), loss_fn_inputs=inputs)
losses = []
for _ in range(3):
    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    losses.append(passed.result().metrics["loss:sum"])
scored = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
path = training.save_state("one").result().path
training.load_state_with_optimizer(path.replace("tinker://", "twinkle://")).result()
sampler = training.save_weights_and_get_sampling_client("drawn")
params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
drawn = sampler.sample(types.ModelInput.from_ints([10, 11, 12, 13]), 2, params, include_prompt_logprobs=True).result()
tokens = [len(one.tokens) for one in drawn.sequences]
print(json.dumps({"losses": losses, "scored": scored, "tokens": tokens, "prompt": drawn.prompt_logprobs}))
"""


@dataclass(frozen=True)
class Exercise:
    """What the client saw when each of its methods was called once."""

    seen: dict[str, Any]
    refused: dict[str, str]
    """What was to be refused and was, with the words."""
    calls: frozenset[str]
    """What was asked for, as ``METHOD path`` and the function of a processor; names are braced."""


def twinkle_kit_python() -> Path:
    """Returns the Python that has `twinkle-kit`; makes its environment first (seven seconds) when there is none."""
    requirement = f"twinkle-kit=={VERSION}"
    cache = REPOSITORY / ".cache" / f"twinkle-kit-{VERSION}-venv"
    return overlaid_python(cache, install=(requirement,), made_from=requirement)


def train_with_pinned_sdk(url: str, key: str, model_name: str, home: Path) -> dict[str, Any]:
    """Trains, saves, loads and samples with the Tinker SDK that the package pins, after its own `init_tinker_client`.

    Raises:
        AssertionError: It failed; holds what was said.
    """
    packages = (f"twinkle-kit=={VERSION}", PINNED_SDK)
    cache = REPOSITORY / ".cache" / f"twinkle-kit-{VERSION}-pinned-venv"
    python = overlaid_python(cache, install=packages, made_from=" ".join(packages))
    command: list[str | Path] = [python, "-c", _SDK_SCRIPT, url, key, model_name]
    told: dict[str, Any] = json.loads(
        printed(start_sdk(command, base_url=url, api_key=key, home=home)).splitlines()[-1]
    )
    return told


def exercise(url: str, key: str, model_name: str, home: Path) -> Exercise:
    """Calls every method of that client once.

    Args:
        url: The service's.
        key: Of a tenant.
        model_name: One that it serves.
        home: An empty folder.

    Raises:
        AssertionError: A call failed that should not have; holds what was said.
    """
    command: list[str | Path] = [twinkle_kit_python(), SCRIPT, url, key, model_name]
    done = start_sdk(command, base_url=url, api_key=key, home=home, timeout_s=240)
    told = json.loads(printed(done).splitlines()[-1])
    return Exercise(told["seen"], told["refused"], frozenset(told["calls"]))
