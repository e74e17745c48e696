"""Four scripts of the Twinkle dialect at once, and the worker killed under them: what they end with does not tell."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256

import pytest

from harness.served import Served
from harness.struck import Struck
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

NUM_STEPS = 8
KILL_AFTER = {2: "worker.executed", 5: "worker.committed"}
GRPO_ROWS = 4

Kills = Mapping[int, Callable[[], None]]
Script = Callable[[MultiLoraTransformersModel, Kills], None]


def row(number: int, length: int = 12) -> dict[str, list[int]]:
    tokens = [(7 * number + 3 * position) % 50 + 10 for position in range(length + 1)]
    return {"input_ids": tokens[:-1], "labels": [-100] * 3 + tokens[4:]}


def fine_tune(model: MultiLoraTransformersModel, kills: Kills) -> None:
    """Windows of two passes, piece by piece, with a schedule."""
    model.set_loss("CrossEntropyLoss", reduction="sum")
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=NUM_STEPS)
    for step in range(NUM_STEPS):
        model.forward(inputs=[row(step), row(step + 1, 7)])
        model.calculate_loss()
        if step in kills:
            # The pass whose rows the next call runs again lies in a worker that is about to die.
            kills[step]()
        model.backward()
        model.clip_grad_norm(1.0)
        model.step()
        model.zero_grad()
        model.lr_step()


def read_text(model: MultiLoraTransformersModel, kills: Kills) -> None:
    """Raw text, of which every token trains."""
    for step in range(NUM_STEPS):
        tokens = row(step, 24)["input_ids"]
        handed = model.submit.forward_backward(inputs=[{"input_ids": tokens[:-1], "labels": tokens[1:]}])
        if step in kills:
            kills[step]()
        handed.result()
        model.clip_grad_and_step()


def learn_from_rewards(model: MultiLoraTransformersModel, kills: Kills) -> None:
    """Answers drawn from what was learnt so far, a loss that compares them, and a reference without an adapter."""
    model.set_loss("GRPOLoss", epsilon=0.2, beta=0.1)
    sampler = vLLMSampler(f"ms://{model.model_id}", connection=model.connection)
    for step in range(NUM_STEPS):
        params = {"max_tokens": 5, "num_samples": GRPO_ROWS, "seed": step, "temperature": 1.0}
        prompt = {"input_ids": row(step, 6)["input_ids"]}
        path = model.save("for-sampling", is_sampler=True)
        (response,) = sampler.sample([prompt], sampling_params=params, adapter_uri=path)
        rows = [sequence.new_input_feature for sequence in response.sequences]
        reference = model.forward_only(inputs=rows, disable_lora=True)
        handed = model.submit.forward_backward(
            inputs=rows,
            advantages=[1.0, -1.0, 0.5, -0.5],
            old_logps=[sequence.logprobs for sequence in response.sequences],
            ref_logps=[list(map(float, logps)) for logps in reference["logps"]] if reference else None,
        )
        if step in kills:
            kills[step]()
        handed.result()
        model.clip_grad_and_step()


def only_ask(model: MultiLoraTransformersModel, kills: Kills) -> None:
    """Log-probabilities alone."""
    for step in range(NUM_STEPS):
        model.forward_only(inputs=[row(step)])


SCRIPTS: Mapping[str, tuple[Script, int, int]] = {
    "sft": (fine_tune, 8, 2),
    "text": (read_text, 32, 1),
    "grpo": (learn_from_rewards, 4, 1),
    "logps": (only_ask, 4, 1),
}


def run(struck: Struck, key: str, name: str, kills: Kills) -> str:
    """Runs a script to its end; the path of what it saved."""
    script, rank, accumulated = SCRIPTS[name]
    with TwinkleClient(struck.served.url, key) as client:
        model = MultiLoraTransformersModel(f"ms://{struck.model}", connection=client.connection)
        config = {"r": rank, "lora_alpha": 8, "target_modules": "all-linear"}
        model.add_adapter_to_model(name, config, gradient_accumulation_steps=accumulated, seed=7)
        model.set_optimizer("AdamW", lr=1e-2)
        script(model, kills)
        return str(model.save("end", save_optimizer=True))


def hashes(served: Served, path: str) -> dict[str, str]:
    """What was saved at the end, and all that was answered on the way there."""
    run_id = path.partition("://")[2].partition("/")[0]
    stored = dict(served.query("SELECT path, files FROM checkpoint WHERE kind = 'training'"))
    files = json.loads(stored["tinker://" + path.partition("://")[2]])
    passes = "SELECT seq, result FROM operation WHERE lane = ? AND kind IN ('forward', 'forward_backward') ORDER BY seq"
    answers = {f"answer {seq}": sha256(result).hexdigest() for seq, result in served.query(passes, run_id)}
    return {name: entry["sha256"] for name, entry in files.items()} | answers


@pytest.fixture(scope="module", params=["struck", pytest.param("struck_model", marks=pytest.mark.soak)])
def world(request: pytest.FixtureRequest) -> Struck:
    """A stack on the engine that computes nothing, or on a real model."""
    stack: Struck = request.getfixturevalue(request.param)
    return stack


def test_four_scripts_at_once_end_as_runs_that_nothing_happened_to(world: Struck) -> None:
    served, crashes = world.served, world.crashes
    epoch = served.query("SELECT epoch FROM mesh")[0][0]
    calm = {name: hashes(served, run(world, served.create_key(f"calm-{name}"), name, {})) for name in SCRIPTS}
    kills = {step: partial(crashes.arm, point) for step, point in KILL_AFTER.items()}
    keys = {name: served.create_key(f"struck-{name}") for name in SCRIPTS}
    paths: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda name=name: paths.update({name: run(world, keys[name], name, kills)}))
        for name in SCRIPTS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)

    assert {name: hashes(served, path) for name, path in paths.items()} == calm
    assert all(calm.values())
    assert served.query("SELECT epoch FROM mesh")[0][0] > epoch
    lanes = served.query(_LANES)
    assert {state for _, _, state in lanes} == {"done"}
    for lane in {lane for lane, _, _ in lanes}:
        numbers = [seq for of, seq, _ in lanes if of == lane]
        assert numbers == list(range(len(numbers)))


_LANES = (
    "SELECT lane, seq, state FROM operation JOIN tenant ON tenant.id = tenant"
    " WHERE kind <> 'sample' AND (name LIKE 'calm-%' OR name LIKE 'struck-%') ORDER BY lane, seq"
)
