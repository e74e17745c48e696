"""How much memory a worker has for adapters, and which ranks it offers for that."""

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.infra.device_memory import host_bytes
from twinkle.module.lora import LoraConfig
from twinkle.workers.engines.transformers_engine import TransformersEngine


def test_ranks_that_do_not_fit_are_not_offered_and_what_fits_is_counted_as_it_is(
    base_dirs: Callable[[str], Path],
) -> None:
    folder = str(base_dirs("qwen3"))
    engine = TransformersEngine.from_settings(Settings(model=folder, threads=1))
    capabilities, pool = engine.capabilities, engine.model.pool
    assert capabilities.max_rank == 128, "all that the settings allow"
    assert capabilities.adapter_bytes < host_bytes() // 2
    sizes = capabilities.adapter_sizes
    assert sizes is not None
    adapter = pool.create(LoraConfig(rank=3), trainable=True)
    assert 3 * sizes.rank_bytes == 4 * adapter.params.nbytes, "weights, gradients, two moments"

    too_large_for_rank_8 = 4 * 8 * sizes.rank_bytes // 3 - 1
    settings = Settings(model=folder, threads=1, adapter_bytes=too_large_for_rank_8)
    with capture_logs() as logs:
        engine = TransformersEngine.from_settings(settings)
    assert engine.capabilities.max_rank == 7
    assert any(line["event"] == "worker.ranks_limited" and line["largest"] == 7 for line in logs)

    with pytest.raises(ConfigError, match=r"TWINKLE_ADAPTER_BYTES: three quarters of 10 are .* adapter of rank 1"):
        TransformersEngine.from_settings(Settings(model=folder, threads=1, adapter_bytes=10))
