"""Served models as jobs know them: what they take, and the folder with their tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

from twinkle.core.mesh import MeshCapabilities
from twinkle.hub.model_path import resolve_model_id
from twinkle.scheduler.placement import choose_mesh
from twinkle.storage.journal.meshes import Meshes

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


def capabilities_of(meshes: Meshes, model: str) -> MeshCapabilities:
    """What is known of a model that is served.

    Raises:
        InvalidInput: It is not.
    """
    mesh = choose_mesh(meshes.all(), model, to_sample=True)
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    return mesh.capabilities


def tokenizer_folder(capabilities: MeshCapabilities) -> Path:
    """Where the model's tokenizer is on this machine; of a mesh on another one it is fetched from its hub."""
    path = capabilities.tokenizer_path
    if path is not None and Path(path).is_dir():
        return Path(path)
    return Path(resolve_model_id(capabilities.base_model, ignore_model=True))


def digest_of_tokenizer(folder: Path) -> str:
    """Of all that makes tokens of conversations."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()


def digest_of_vocabulary(folder: Path) -> str:
    """Of which token means what."""
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()
