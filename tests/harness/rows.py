"""Conversations for data sets, and files that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.chat_templates import save_tokenizer
from twinkle.template import Template

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "rains", "in", "Paris"]


def conversation(number: int, num_words: int = 4) -> dict[str, Any]:
    """A question and an answer of so many words; no two numbers below ten thousand have the same."""
    words = " ".join(WORDS[(number + place) % len(WORDS)] for place in range(num_words))
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": words},
        ]
    }


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """A JSONL file; a row that is text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def own_data_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `datasets` writes for a test, it writes below the test's folder."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    return cache


@pytest.fixture(scope="session")
def template_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def template(template_folder: Path) -> Template:
    """A template that refuses rows over 64 tokens."""
    return Template(str(template_folder), max_length=64)
