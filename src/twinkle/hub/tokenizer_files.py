"""The tokenizer that belongs to a model."""

from __future__ import annotations

from pathlib import Path

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def tokenizer_files(model: str) -> dict[str, bytes]:
    """The tokenizer's files of a local model; none for a model of a hub."""
    folder = Path(model)
    return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
