"""A whole node of a Ray cluster is lost in the middle of a run; the mesh goes on on another one, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.ray_cluster import RayCluster
from harness.served import Served
from harness.struck_training import NUM_STEPS, train

# Some minutes for a cluster; what the owner of ranks does is held in tests/unit/workers/test_ranks_on_ray.py.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

LOST_AFTER = 5


def test_a_run_goes_on_on_another_node_with_the_losses_and_files_of_a_calm_one(
    tmp_path: Path, tiny_model: Path
) -> None:
    with RayCluster(num_nodes=2, cpus_each=1) as cluster:
        settings = {"TWINKLE_RANKS": "ray:2", "TWINKLE_RAY_ADDRESS": cluster.address}

        def lose_a_node() -> None:
            cluster.kill_node("127.0.0.4")
            cluster.add_node()

        with Served(tmp_path / "home", model=str(tiny_model), model_name="tiny", **settings) as served:
            calm = train(served, "calm")
            struck = train(served, "struck", after=LOST_AFTER, strike=lose_a_node)
            files = dict(served.query("SELECT path, files FROM checkpoint WHERE kind = 'training'"))
            operations = served.query("SELECT seq, state FROM operation WHERE lane = ? ORDER BY seq", struck.adapter)
            [(epochs,)] = served.query("SELECT epoch FROM mesh")
            said = served.logs()

    assert struck.losses == calm.losses
    sha256s = [{name: file["sha256"] for name, file in json.loads(files[run.path]).items()} for run in (calm, struck)]
    assert sha256s[0] == sha256s[1]
    assert operations == [(seq, "done") for seq in range(2 * NUM_STEPS + 2)]
    assert epochs >= 2
    assert "rank.lost" in said
    assert "127.0.0.5" in said
