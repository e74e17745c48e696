"""Both hubs' caches in a folder of the test's own; no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.hub_caches import Caches


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    made = Caches(modelscope=tmp_path / "modelscope", hugging_face=tmp_path / "huggingface")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TWINKLE_HUBS", "TWINKLE_MODEL_ID_ALIASES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(made.modelscope))
    monkeypatch.setenv("HF_HOME", str(made.hugging_face))
    monkeypatch.setenv("TWINKLE_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "huggingface" / "datasets")
    return made
