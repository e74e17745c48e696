"""Ranks on the nodes of a Ray cluster: the bits of ranks on one machine, and the same end when one is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.polling import wait_until
from harness.rank_zero import RankZero
from harness.ray_cluster import RayCluster
from twinkle.core.adapter import AdapterConfig
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.settings import Settings
from twinkle.hub.tiny import make_tiny_model
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.sampling import parse_sample
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import Pass
from twinkle.workers.process import build_engine
from twinkle.workers.ranks.engine import RankedEngine
from twinkle.workers.ranks.on_ray import RayWorld
from twinkle.workers.ranks.world import EXIT_RANK_LOST

ENDS_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, texts=["a tiny text"] * 4, hidden_size=64, layers=2, vocab_size=300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes, each with room for one rank of two meshes."""
    with RayCluster(num_nodes=2, cpus_each=2) as running:
        yield running


@pytest.fixture(scope="module")
def owner(model: Path, cluster: RayCluster) -> Iterator[RankZero]:
    """A mesh that takes one of two CPUs of each node."""
    started = RankZero(model, ranks="ray:2", ray_address=cluster.address)
    yield started
    started.end()


@pytest.fixture(scope="module")
def on_ray(model: Path, cluster: RayCluster) -> Iterator[RankedEngine]:
    with pytest.MonkeyPatch.context() as environment:
        # Its nodes were started without it.
        environment.setenv("TWINKLE_MODEL_ID_ALIASES", json.dumps({"an/alias": str(model)}))
        engine = build_engine(settings_of("ms://an/alias", ranks="ray:2", ray_address=cluster.address))
    assert isinstance(engine, RankedEngine)
    yield engine
    engine.close()


def settings_of(model: Path | str, **more: object) -> Settings:
    return Settings(model=str(model), model_name="tiny", threads=1, tokens_per_pass=48, **more)


def body(seed: int, *lengths: int, loss: str = "cross_entropy") -> ForwardBackwardBody:
    rng = np.random.default_rng(seed)
    data = tuple(
        WireDatum(
            rng.integers(0, 250, length),
            {"target_tokens": rng.integers(0, 250, length), "weights": rng.normal(size=length).astype(np.float32)},
        )
        for length in lengths
    )
    return ForwardBackwardBody("adapter", 0, False, loss, {}, data)


def trained(engine: RankedEngine) -> bytes:
    """An adapter's whole state after some steps."""
    adapter = engine.create(AdapterConfig(base_model="tiny", rank=4, seed=3))
    for step in range(3):
        [answer] = engine.run_passes([Pass(state=adapter, body=body(step, 30, 5, 17, 40))])
        assert not isinstance(answer, Exception), answer
        assert engine.has_gradients(adapter)
        engine.optim_step(adapter, AdamParams(learning_rate=1e-2))
    return engine.snapshot(adapter)


def test_two_ranks_on_two_nodes_come_to_the_bits_of_two_on_one_machine(model: Path, on_ray: RankedEngine) -> None:
    on_machine = build_engine(settings_of(model, ranks=2))
    try:
        assert trained(on_ray) == trained(on_machine)
    finally:
        on_machine.close()


def test_an_error_comes_back_as_what_it_is(on_ray: RankedEngine) -> None:
    adapter = on_ray.create(AdapterConfig(base_model="tiny", rank=4, seed=0))

    with pytest.raises(InvalidInput) as raised:
        on_ray.optim_step(adapter, AdamParams(learning_rate=-1.0))
    [answer] = on_ray.run_passes([Pass(state=adapter, body=body(0, 4, loss="no such loss"))])

    assert raised.value.field
    assert isinstance(answer, InvalidInput)


def test_what_is_sampled_comes_from_rank_zero(on_ray: RankedEngine) -> None:
    request = parse_sample(
        b'{"num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]},'
        b' "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []}, "seq_id": 0, "sampling_session_id": "s"}'
    )

    on_ray.add_sample("r", None, request, cache_group="tenant:t")
    outputs = []
    while on_ray.num_samples_under_way:
        outputs += on_ray.step_samples()

    assert [(output.request_id, output.error) for output in outputs] == [("r", None)]
    assert outputs[0].result


def test_a_mesh_on_a_cluster_says_what_it_is(on_ray: RankedEngine) -> None:
    assert (on_ray.capabilities.ranks, on_ray.capabilities.threads) == (2, 1)
    assert len(on_ray.follower_pids) == 2


def test_the_owner_ends_when_a_rank_is_killed_and_so_do_the_others(owner: RankZero) -> None:
    owner.ranks[1].kill()

    code, said = owner.ended(ENDS_S)

    assert code == EXIT_RANK_LOST, said
    assert "rank.lost" in said
    wait_until(lambda: not owner.ranks[0].is_running(), what="the other rank's end", deadline_s=ENDS_S)


def test_launch_server_finds_the_cluster_that_runs(cluster: RayCluster) -> None:
    script = (
        "import sys; from twinkle.server.launch.cluster import running_cluster;"
        " found = running_cluster({'RAY_ADDRESS': sys.argv[1]});"
        " print(found.address, found.num_gpus, found.num_cpus)"
    )

    told = subprocess.run([sys.executable, "-c", script, cluster.address], capture_output=True, text=True, check=True)

    assert told.stdout.split()[-3:] == [cluster.address, "0", "4.0"]


def test_no_cluster_is_refused_with_what_to_start() -> None:
    with pytest.raises(ConfigError, match="ray start"):
        RayWorld(Settings(model="m", ranks="ray:2", ray_address="127.0.0.9:1"))


@pytest.mark.parametrize("ranks", ["ray:", "ray:two", "slurm:4", "ray:0"])
def test_ranks_that_are_neither_a_number_nor_on_ray_are_refused(ranks: str) -> None:
    with pytest.raises(ValueError, match="ranks"):
        Settings(ranks=ranks)
