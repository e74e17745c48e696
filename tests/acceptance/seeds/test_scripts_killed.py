"""The documents' scripts of two tenants, and the README's four tenants, with a SIGKILL of the worker in the middle.

Weights and answers are those, to the bit, of the same work that nobody disturbed. Scripts run as they are written, but
for what a tiny model and a short run need: the server's address and the key, the numbers of ``SIZES`` (rows, steps,
tokens, steps of warm-up, passes of a window) and what ``SEEDS`` puts before them (seeds of adapters and samples, and
another ``FormatReward``, since a tiny model never writes what the documents' one rewards).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.hub_world import HubWorld
from harness.polling import wait_for
from harness.script_run import run_script
from harness.seeds import Script, at_server
from harness.served import Served
from twinkle.storage.tenants.keyring import digest_of_key
from twinkle_client import TwinkleClient
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

SERVED_AS = "Qwen/Qwen3.5-4B"
MODEL = f"ms://{SERVED_AS}"
SCRIPTS = (("000:526", "000:318"), ("002:678", "002:420"), ("003:186", "002:420"))
"""Two tenants each: a script of the SDK, and one of our client."""
SIZES = {
    r"data_slice=range\(500\)": "data_slice=range(24)",
    r"MAX_NEW_TOKENS = 1024": "MAX_NEW_TOKENS = 6",
    r"MAX_STEPS = 10": "MAX_STEPS = 6",
    r"num_warmup_steps=500": "num_warmup_steps=1",
    r"GRADIENT_ACCUMULATION_STEPS = 4": "GRADIENT_ACCUMULATION_STEPS = 1",
}
SEEDS = """\
import tinker
import twinkle.reward
import twinkle_client.model
import twinkle_client.sampler

_create = tinker.ServiceClient.create_lora_training_client
_add = twinkle_client.model.MultiLoraTransformersModel.add_adapter_to_model
_sample = twinkle_client.sampler.vLLMSampler.sample
_drawn = []


class FormatReward:
    def __call__(self, trajectories, ground_truths):
        return [float(sum(row["input_ids"]) % 2) for row in trajectories]


def _seeded_sample(self, inputs, sampling_params=None, **others):
    _drawn.append(inputs)
    return _sample(self, inputs, {**sampling_params, "seed": len(_drawn)}, **others)


tinker.ServiceClient.create_lora_training_client = lambda self, **given: _create(self, seed=7, **given)
twinkle_client.model.MultiLoraTransformersModel.add_adapter_to_model = (
    lambda self, *given, **named: _add(self, *given, seed=7, **named)
)
twinkle_client.sampler.vLLMSampler.sample = _seeded_sample
twinkle.reward.FormatReward = FormatReward
"""
"""A tiny model never writes what the documents reward; without differences there is nothing to learn."""


@pytest.fixture(scope="module")
def service(world: HubWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("killed") / "home"
    model = world.model("qwen3")
    with Served(home, model=str(model), model_name=SERVED_AS, flags=("--any-key",), **world.environment) as it:
        yield it


def num_steps(service: Served) -> int:
    return int(service.query("SELECT COUNT(*) FROM operation WHERE kind = 'optim_step' AND state = 'done'")[0][0])


def weights(service: Served, paths: Sequence[str]) -> dict[str, str]:
    """The digests of checkpoints' weights, by name."""
    found = {}
    for path in paths:
        ((name, files),) = service.query(
            "SELECT name, files FROM checkpoint WHERE path = ?", path.replace("twinkle://", "tinker://")
        )
        found[name] = json.loads(files)["adapter_model.safetensors"]["sha256"]
    return found


def weights_of(service: Served, key: str) -> dict[str, str]:
    """The same, of all that whoever came with a key has saved."""
    tenant = f"anyone-{digest_of_key(f'any key:{key}')[:12]}"
    saved = service.query(
        "SELECT checkpoint.path FROM checkpoint JOIN tenant ON tenant.id = checkpoint.tenant WHERE tenant.name = ?",
        tenant,
    )
    return weights(service, [path for (path,) in saved])


def killing(service: Served, works: Sequence[Callable[[], Any]], *, after_steps: int) -> list[Any]:
    """Does everything at once, and kills the worker when so many steps have been made."""
    before = num_steps(service)
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        wait_for(lambda: num_steps(service) - before >= after_steps, what="steps", deadline_s=300)
        assert not any(future.done() for future in futures)
        service.kill_engine()
        return [future.result() for future in futures]


@pytest.mark.parametrize("names", SCRIPTS, ids=" and ".join)
def test_scripts_of_two_tenants_save_the_same_weights_when_the_worker_is_killed(
    service: Served, scripts: list[Script], world: HubWorld, tmp_path: Path, names: tuple[str, str]
) -> None:
    texts = {script.name: script.text for script in scripts}

    def run(name: str, key: str) -> dict[str, str]:
        text = at_server(texts[name], service.url, SERVED_AS)
        text = re.sub(r"api_key='(your-api-key)?'", f"api_key='{key}'", text)
        for written, set_to in SIZES.items():
            text = re.sub(written, set_to, text)
        run_script(SEEDS + text, tmp_path / key, {**world.environment, "MODELSCOPE_TOKEN": key}, time_limit_s=600)
        return weights_of(service, key)

    calm = [run(name, f"calm-{place}-of-{names[0][:3]}") for place, name in enumerate(names)]
    works = [
        lambda name=name, place=place: run(name, f"struck-{place}-of-{names[0][:3]}")
        for place, name in enumerate(names)
    ]
    struck = killing(service, works, after_steps=4)

    assert struck == calm
    assert [len(saved) for saved in calm] == [3, 7]
    assert all(len(set(saved.values())) > 1 for saved in calm), "they have learned"


# -- the README's four tenants ----------------------------------------------------------------------------------------

PRIVATE = [
    {"messages": [{"role": "user", "content": f"Number {n}?"}, {"role": "assistant", "content": f"It is {n * n}."}]}
    for n in range(12)
]
ROWS = [{"input_ids": [n, n + 1, n + 2, n + 3], "labels": [n + 1, n + 2, n + 3, -100]} for n in range(5, 45, 4)]
STEPS = 5


def opened(client: TwinkleClient, *, rank: int, loss: str, **keywords: Any) -> MultiLoraTransformersModel:
    model = MultiLoraTransformersModel(MODEL, connection=client.connection)
    model.add_adapter_to_model("default", {"r": rank, "lora_alpha": 16, "target_modules": "all-linear"}, seed=3)
    model.set_loss(loss, **keywords)
    model.set_optimizer("AdamW", lr=1e-3)
    return model


def private_data(client: TwinkleClient) -> list[Any]:
    model = opened(client, rank=8, loss="CrossEntropyLoss", reduction="sum")
    model.set_template("Qwen3_5Template", model_id=MODEL)
    return [trained(model, PRIVATE[2 * step : 2 * step + 2]) for step in range(STEPS)] + [model.save("end")]


def hub_data_as_raw_text(client: TwinkleClient) -> list[Any]:
    dataset = Dataset(
        DatasetMeta("ms://swift/self-cognition", data_slice=range(2 * STEPS)), connection=client.connection
    )
    texts = [f"{row['query']} {row['response']}" for row in (dataset[n] for n in range(2 * STEPS))]
    model = opened(client, rank=32, loss="CrossEntropyLoss", reduction="sum")
    model.set_template("Template", model_id=MODEL, use_chat_template=False)
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return [trained(model, rows[2 * step : 2 * step + 2]) for step in range(STEPS)] + [model.save("end")]


def rewarded(client: TwinkleClient) -> list[Any]:
    model = opened(client, rank=8, loss="GRPOLoss", epsilon=0.2)
    sampler = vLLMSampler(MODEL, connection=client.connection)
    sampler.set_template("Qwen3_5Template", model_id=MODEL)
    told: list[Any] = []
    for step in range(STEPS):
        params = {"max_tokens": 5, "num_samples": 4, "logprobs": 1, "seed": step}
        responses = sampler.sample([{"messages": PRIVATE[step]["messages"][:1]}], params, adapter_name="default")
        sequences = list(responses[0].sequences)
        advantages = [1.0 if sum(one.tokens) % 2 else -1.0 for one in sequences]
        logps = [[pairs[0][1] for pairs in one.logprobs] for one in sequences]
        keywords = {"advantages": advantages, "old_logps": logps}
        told += [[one.tokens for one in sequences], logps]
        told.append(trained(model, [one.new_input_feature for one in sequences], **keywords))
    return [*told, model.save("end")]


def logprobs_only(client: TwinkleClient) -> list[Any]:
    model = opened(client, rank=8, loss="CrossEntropyLoss")
    told = []
    for step in range(STEPS):
        rows = ROWS[2 * step : 2 * step + 2]
        told += [model.forward_only(inputs=rows, disable_lora=alone).result["logps"] for alone in (True, False)]
    return told


def trained(model: MultiLoraTransformersModel, rows: Sequence[Mapping[str, Any]], **keywords: Any) -> Any:
    result = model.forward_backward(inputs=list(rows), **keywords).result
    model.clip_grad_and_step()
    return [result["loss"], result["logps"]]


TENANTS = (private_data, hub_data_as_raw_text, rewarded, logprobs_only)


def test_four_tenants_at_once_get_the_bits_that_each_gets_alone_when_the_worker_is_killed(service: Served) -> None:
    def work(tenant: Callable[[TwinkleClient], list[Any]], key: str) -> tuple[list[Any], dict[str, str]]:
        with TwinkleClient(service.url, key) as client:
            told = tenant(client)
        paths = [str(one) for one in told if str(one).startswith("twinkle://")]
        return [one for one in told if str(one) not in paths], weights(service, paths)

    alone = [work(tenant, f"alone-{tenant.__name__}") for tenant in TENANTS]
    works = [lambda tenant=tenant: work(tenant, f"together-{tenant.__name__}") for tenant in TENANTS]
    together = killing(service, works, after_steps=3)

    for tenant, calm, struck in zip(TENANTS, alone, together, strict=True):
        assert struck == calm, tenant.__name__
    assert [len(saved) for _, saved in alone] == [1, 1, 1, 0]
