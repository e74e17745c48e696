"""A mesh by Megatron whose ranks stand on a Ray cluster, behind the whole service, and a rank of it that is killed."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import tinker

from harness.polling import wait_until
from harness.ray_cluster import RayCluster
from harness.served import Served
from harness.struck_training import NUM_STEPS, train
from twinkle.hub.tiny import make_tiny_model

# Some minutes for a cluster and two meshes; what the ranks themselves do is held in tests/unit/workers.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

LOST_AFTER = 5


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2"])
def test_a_killed_rank_is_replaced_to_the_bits_of_a_calm_run_and_what_is_saved_is_sampled(
    layout: str, tmp_path: Path
) -> None:
    model = make_tiny_model(
        tmp_path / "tiny", texts=["a tiny text"] * 4, hidden_size=128, layers=2, vocab_size=300, context=256
    )
    meshes = ("--mesh", f"big=cpu,ranks=ray:2,engine=megatron,{layout}", "--mesh", "samples=cpu,serves=samples")
    with RayCluster(num_nodes=2, cpus_each=1) as cluster:
        settings = {"TWINKLE_RAY_ADDRESS": cluster.address}
        with Served(tmp_path / "home", model=str(model), model_name="tiny", flags=meshes, **settings) as served:
            # The API answers for the model as soon as one of its meshes is there.
            wait_until(lambda: "ready in" in served.logs(), what="readiness of both meshes", deadline_s=600.0)
            calm = train(served, "calm")
            struck = train(served, "struck", after=LOST_AFTER, strike=_kill_a_rank)
            files = dict(served.query("SELECT path, files FROM checkpoint WHERE kind = 'training'"))
            operations = served.query("SELECT seq, state FROM operation WHERE lane = ? ORDER BY seq", struck.adapter)
            [(epoch, told)] = served.query("SELECT epoch, capabilities FROM mesh WHERE name = 'big'")
            drawn = _sample(served, "calm", calm.path)
            said = served.logs()

    assert struck.losses == calm.losses
    sha256s = [{name: file["sha256"] for name, file in json.loads(files[run.path]).items()} for run in (calm, struck)]
    assert sha256s[0] == sha256s[1]
    assert operations == [(seq, "done") for seq in range(2 * NUM_STEPS + 2)]
    assert json.loads(told)["determinism"] == "unfused"
    assert epoch >= 2
    assert "rank.lost" in said
    assert len(drawn) == 4


def _kill_a_rank() -> None:
    """One of the actors that hold a part of the model; the cluster's processes are this one's."""
    words = [(process, " ".join(process.cmdline())) for process in psutil.Process().children(recursive=True)]
    actors = [process for process, said in words if said.startswith("ray::") and "RayRank" in said]
    assert len(actors) == 2, words
    actors[-1].kill()


def _sample(served: Served, tenant: str, path: str) -> list[int]:
    training = served.client(tenant).create_training_client_from_state(path)
    saved = training.save_weights_for_sampler("said").result().path
    client = served.client(tenant).create_sampling_client(model_path=saved)
    parameters = tinker.SamplingParams(max_tokens=4, seed=1)
    answer = client.sample(tinker.ModelInput.from_ints([5, 6, 7]), 1, parameters).result()
    return list(answer.sequences[0].tokens)
