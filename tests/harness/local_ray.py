"""A small Ray of this machine for a module of tests."""

from __future__ import annotations

import logging
import os
from types import TracebackType

import pytest

ray = pytest.importorskip("ray", reason="the extra twinkle-queue[ray] is not installed")

OBJECT_STORE_BYTES = 100 * 1024**2


class RayProcesses:
    """Ray's own processes, from beginning to end of a ``with`` block. Scripts within it use this Ray."""

    def __init__(self, *, num_cpus: int) -> None:
        self._num_cpus = num_cpus

    def __enter__(self) -> RayProcesses:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=self._num_cpus,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
            log_to_driver=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()
