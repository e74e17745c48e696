"""One Ray for all tests of this folder, with workers of two groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.local_ray import RayProcesses
from twinkle.infra import DeviceGroup, runtime

GROUPS = [DeviceGroup("model", 2, "GPU"), DeviceGroup("sampler", [2], "GPU")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[runtime.Runtime]:
    """What ``initialize`` was told, with Ray's processes behind it."""
    with RayProcesses(num_cpus=4):
        runtime.initialize(mode="ray", groups=GROUPS, seed=7)
        yield runtime.runtime()
        runtime.forget()


@pytest.fixture
def on_ray(cluster: runtime.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test runs a script in the mode ``ray``."""
    monkeypatch.setattr(runtime._this_process, "_runtime", cluster)
