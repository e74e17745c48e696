"""Megatron's layers in plain torch compute what transformers' do, alone and shared by ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle.core.process.requirements import requires

TESTS = Path(__file__).parents[3]
TOLERANCE = 1e-4
"""Of a value's largest entry: sums over tokens in another order, in float32."""
MIXING = ("alone", "tp 2", "tp 2, sequence parallel", "cp 2")
EXPERTS = ("alone", "tp 2, sequence parallel", "cp 2", "ep 2", "tp 2, ep 2")

Found = list[dict[str, dict[str, dict[str, tuple[float, float]]]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What two ranks found, in one start."""
    try:
        requires("megatron-core")
    except ImportError:
        pytest.skip("needs the extra megatron")
    path = tmp_path_factory.mktemp("layers") / "found.json"
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "harness.forked_ranks", "2", "harness.megatron_layers.layers", str(path)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=240,
    )
    result: Found = json.loads(path.read_text())
    return result


@pytest.mark.parametrize(
    ("layer", "layout"),
    [
        *((layer, layout) for layer in ("attention", "delta net", "latent attention") for layout in MIXING),
        *((f"experts of {family}", layout) for family in ("Qwen2", "Qwen3", "DeepSeek") for layout in EXPERTS),
    ],
)
def test_a_layer_gives_the_outputs_and_gradients_of_transformers(layer: str, layout: str, found: Found) -> None:
    for rank, layouts in enumerate(found):
        compared = layouts[layout][layer]

        assert len(compared) >= 4
        far = {name: values for name, values in compared.items() if values[0] > TOLERANCE * values[1]}
        assert not far, f"rank {rank}: {far}"
        assert all(size > 0 for _, size in compared.values())
