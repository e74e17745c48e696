"""A mesh by Megatron behind the worker's protocol: what the fused engine computes, on ranks that share every layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import megatron_engine
from harness.megatron_engine import config_of, settings_of, step, work
from harness.megatron_families import make_family
from harness.ray_cluster import RayCluster
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.process import build_engine

TESTS = Path(megatron_engine.__file__).parents[1]
TIME_LIMIT_S = 550.0
pytestmark = pytest.mark.timeout(600)
LAYOUTS = [
    "qwen3_moe 2x1x1",
    *(
        pytest.param(layout, marks=pytest.mark.soak)
        for layout in (
            "qwen3 2x1x1",
            "qwen3 1x2x1",
            "qwen3 1x2x1 ray",
            "qwen3 2x2x1",
            "qwen2 2x1x1",
            "qwen3_5_text 2x1x1",
            "qwen3_5_moe_text 1x1x2",
            "deepseek_v2 2x1x1",
            "qwen2_moe 1x1x2",
            "qwen3_moe 2x1x2",
            "deepseek_v3 1x1x2",
            "deepseek_v3 2x2x1",
        )
    ),
]
"""A family of models, over how many ranks tensors, layers and experts are, and where these are if not here."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a family; two tensor ranks do not divide its vocabulary, but its groups of heads."""
    folder = tmp_path_factory.mktemp("models")

    def model(family: str) -> Path:
        if not (folder / family).exists():
            make_family(folder / family, family)
        return folder / family

    return model


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes, each with room for one rank."""
    with RayCluster(num_nodes=2, cpus_each=1) as running:
        yield running


@pytest.fixture(scope="module", params=LAYOUTS)
def found(models: Callable[[str], Path], request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a mesh came to, in a process of its own: Megatron's groups are a process's for good."""
    family, layout, *on_ray = request.param.split()
    cluster = request.getfixturevalue("cluster") if on_ray else None
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [
            *(sys.executable, "-m", megatron_engine.__name__, str(models(family)), layout),
            *([] if cluster is None else [cluster.address]),
        ],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TWINKLE_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    told: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return {"family": family, "layout": layout, **told}


@pytest.fixture(scope="module")
def fused(found: dict[str, Any], models: Callable[[str], Path]) -> TransformersEngine:
    return TransformersEngine.from_settings(settings_of(str(models(found["family"]))))


@pytest.fixture(scope="module")
def expected(fused: TransformersEngine) -> dict[str, Any]:
    return work(fused)


def test_two_tenants_train_as_on_the_fused_engine(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-3)
            assert mine["norm"] == pytest.approx(other["norm"], rel=1e-3)
            assert mine["logprobs"] == pytest.approx(other["logprobs"], rel=1e-4, abs=1e-3)


def test_the_base_model_alone_is_that_of_the_fused_engine(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["base"] == pytest.approx(expected["base"], rel=1e-4, abs=1e-3)
    assert found["base"] != pytest.approx(expected["steps"][-1][0]["logprobs"], rel=1e-4, abs=1e-3)


def test_a_restored_adapter_replays_alone_to_the_same_bits(found: dict[str, Any]) -> None:
    assert found["replayed"] == [True, True]


def test_its_checkpoints_go_on_in_the_fused_engine(
    found: dict[str, Any], expected: dict[str, Any], fused: TransformersEngine
) -> None:
    files = [{name: bytes.fromhex(text) for name, text in each.items()} for each in found["exported"]]

    loaded = [fused.load(config_of(number), files[number], with_optimizer=True, trainable=True) for number in range(2)]
    told = step(fused, loaded, 4)

    assert {"adapter_config.json", "adapter_model.safetensors"} <= files[0].keys()
    for mine, other in zip(told, expected["steps"][-1], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-3)


def test_what_one_tenant_gets_wrong_is_its_own(found: dict[str, Any]) -> None:
    assert found["refused"] == ["loss_fn", "False", "True"]


def test_it_says_what_it_is_and_what_it_promises(found: dict[str, Any]) -> None:
    told = found["capabilities"]
    tp, pp, ep = (int(size) for size in found["layout"].split("x"))

    assert (told["engine"], told["serves"], told["ranks"]) == ("megatron", "training", tp * pp * ep)
    assert (told["tensor_parallel"], told["pipeline_parallel"], told["expert_parallel"]) == (tp, pp, ep)
    assert told["determinism"] in {"unfused", "none"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"ranks": 2}, "TWINKLE_RANKS"),
        ({"ranks": 2, "tensor_parallel": 2, "shard": "fsdp"}, "TWINKLE_SHARD"),
        ({"serves": "samples"}, "TWINKLE_SERVES"),
        ({"engine": "transformers", "ranks": 2, "tensor_parallel": 2}, "TWINKLE_TENSOR_PARALLEL"),
        ({"engine": "transformers", "ranks": 2, "expert_parallel": 2}, "TWINKLE_EXPERT_PARALLEL"),
        ({"ranks": 2, "tensor_parallel": 2, "expert_parallel": 2}, "TWINKLE_EXPERT_PARALLEL"),
    ],
)
def test_settings_that_do_not_go_together_are_named(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_engine(Settings(model="somewhere", **{"engine": "megatron", **more}))
