"""Two processes that were started together, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

import twinkle
from twinkle.core.errors import ConfigError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.process_group import torch_mesh

RANK_CODE = """
import torch, twinkle
from torch import distributed
from twinkle.infra.process_group import torch_mesh

mesh = twinkle.DeviceMesh.from_sizes(dp_size=2, device_type="cpu")
twinkle.initialize(mode="local", global_device_mesh=mesh)
rank = torch.tensor([float(distributed.get_rank()) + 1])
distributed.all_reduce(rank, group=torch_mesh(mesh)["dp"].get_group())
print(twinkle.is_master(), rank.item(), mesh.slice_data(list("abc")))
"""


def test_the_ranks_of_a_mesh_meet_and_split_their_data() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_CODE], env={**shared, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE
        )
        for rank in "01"
    ]
    said = [rank.communicate(timeout=60)[0].decode().splitlines()[-1] for rank in ranks]

    assert said == ["True 3.0 ['a']", "False 3.0 ['b', 'c']"]


def test_a_mesh_of_another_size_than_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_mesh: has 2 ranks .* but 1 processes were started"):
        torch_mesh(DeviceMesh.from_sizes(dp_size=2))


def test_alone_a_process_is_the_master() -> None:
    assert twinkle.is_master()
