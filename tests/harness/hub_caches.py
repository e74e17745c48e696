"""Caches of both hubs, filled by hand as their libraries lay them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = {"config.json": '{"model_type": "qwen3"}', "tokenizer.json": "{}", "model.safetensors": "weights"}


@dataclass(frozen=True)
class Caches:
    """Where the hubs' caches are."""

    modelscope: Path
    hugging_face: Path

    def put(self, folder: str, files: Mapping[str, str]) -> Path:
        """Files in a folder of ModelScope's cache."""
        return fill(self.modelscope / folder, files)

    def put_hugging_face(
        self, repository: str, files: Mapping[str, str], *, kind: str = "model", commit: str = "c0ffee", ref: str = ""
    ) -> Path:
        """A snapshot as ``huggingface_hub`` keeps one: blobs, links to them, and a branch that names the commit."""
        root = self.hugging_face / "hub" / f"{kind}s--{repository.replace('/', '--')}"
        snapshot = root / "snapshots" / commit
        for number, (name, text) in enumerate(files.items()):
            blob = fill(root / "blobs", {f"{commit}{number}": text}) / f"{commit}{number}"
            link = snapshot / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
        if ref:
            fill(root / "refs", {ref: commit})
        return snapshot


def fill(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def lines(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
