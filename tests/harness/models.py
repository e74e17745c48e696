"""Tiny real models for the tests of whole services."""

from __future__ import annotations

from pathlib import Path

from twinkle.hub.tiny import Family, make_tiny_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"


def make_text_model(folder: Path, family: Family = "qwen3") -> Path:
    """A tiny model with random weights, and a tokenizer trained on the shipped text."""
    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.jsonl"))]
    return make_tiny_model(folder, texts=texts, family=family, hidden_size=32, layers=2, vocab_size=400)
