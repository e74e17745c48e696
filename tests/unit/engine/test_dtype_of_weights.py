"""Which dtype a worker's frozen weights have: what suits the device, or what is asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from twinkle.core.settings import Settings
from twinkle.module.lora import LoraConfig
from twinkle.workers.engines.transformers_engine import TransformersEngine


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_frozen_weights_are_of_the_dtype_that_is_asked_for(
    asked: str, dtype: torch.dtype, base_dirs: Callable[[str], Path]
) -> None:
    settings = Settings(model=str(base_dirs("qwen3")), threads=1, dtype=asked)
    engine = TransformersEngine.from_settings(settings)
    assert engine.model.dtype == dtype
    # Its mode is measured with it: strict products are float32's alone.
    assert (engine.model.determinism == "mkl-strict") <= (dtype == torch.float32)
    assert engine.model.pool.create(LoraConfig(rank=4)).params.dtype == torch.float32
