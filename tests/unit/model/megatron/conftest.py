"""Tiny models of the families that Megatron trains, deep enough for four stages."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from twinkle.hub.tiny import make_tiny_model

TEXTS = ["the quick brown fox jumps over the lazy dog, and the dog looks at the fox. " * 8]
LAYERS = 4


@pytest.fixture(scope="session")
def families_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    for family in ("qwen3", "qwen2"):
        # Two tensor ranks do not divide this vocabulary.
        make_tiny_model(
            folder / family, family=family, texts=TEXTS, vocab_size=289, hidden_size=128, layers=LAYERS, context=256
        )
    _tie(folder / "qwen2", folder / "tied")
    return folder


def _tie(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(target / "model.safetensors")
    del tensors["lm_head.weight"]
    # Logits of unit embeddings would be large.
    tensors["model.embed_tokens.weight"] *= 0.1
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
