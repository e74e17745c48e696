"""Folders of models that name code of their own: nothing of it runs, and nobody is asked on the terminal."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.loading import load_base_model
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle.template.pictures import picture_preparer
from twinkle.workers.engines.transformers_engine import TransformersEngine

SOURCE = Path(__file__).parents[3] / "src" / "twinkle"
_CODE = """
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

Path({marker!r}).write_text("ran")


class OwnConfig(PreTrainedConfig):
    model_type = "nobody_knows_it"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


class Attack:
    """A folder whose code leaves a mark when it runs, and a person at the terminal who always says yes."""

    def __init__(self, folder: Path, marker: Path) -> None:
        self.folder = folder
        self.marker = marker
        self.asked: list[str] = []

    def answer(self, question: str = "") -> str:
        self.asked.append(question)
        return "y"


@pytest.fixture
def attack(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Attack:
    made = Attack(tmp_path / "model", tmp_path / "ran")
    shutil.copytree(model_dir, made.folder)
    (made.folder / "own.py").write_text(_CODE.format(marker=str(made.marker)))
    config = json.loads((made.folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel", "AutoModel": "own.OwnModel"}
    config |= {"model_type": "nobody_knows_it", "auto_map": own}
    (made.folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((made.folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (made.folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("builtins.input", made.answer)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.delenv("TWINKLE_TRUST_REMOTE_CODE", raising=False)
    return made


def _serve(folder: str) -> Any:
    return TransformersEngine.from_settings(Settings(model=folder, threads=1))


READERS: dict[str, Callable[[str], Any]] = {
    "worker": _serve,
    "base model": lambda folder: load_base_model(folder, name=folder, dtype=torch.float32),
    "TransformersModel": lambda folder: TransformersModel(model_id=folder),
    "TransformersModel told to trust": lambda folder: TransformersModel(model_id=folder, trust_remote_code=True),
    "MultiLoraTransformersModel": lambda folder: MultiLoraTransformersModel(model_id=folder),
    "sampler": lambda folder: TorchSampler(folder),
    "sampler of a class": lambda folder: TorchSampler(folder, model_cls="AutoModel"),
    "template": lambda folder: Template(folder).encode({"messages": [{"role": "user", "content": "hello"}]}),
    "pictures": picture_preparer,
}


@pytest.mark.parametrize("reader", READERS)
def test_code_of_a_model_is_never_run_and_nobody_is_asked(attack: Attack, reader: str) -> None:
    try:
        READERS[reader](str(attack.folder))
    except ConfigError as error:
        refusal = error.message
    else:
        # What needs none of the code reads the rest.
        refusal = "auto_map"

    assert attack.asked == []
    assert not attack.marker.exists()
    assert "auto_map" in refusal


def test_every_reader_of_models_says_that_no_code_is_run() -> None:
    """transformers' ``Auto`` classes ask on the terminal where nothing is said."""
    silent = [
        f"{file.relative_to(SOURCE)}:{call.lineno}"
        for file in SOURCE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and _reads_by_auto_class(call) and not _says_whether_code_runs(call)
    ]

    assert silent == []


def _reads_by_auto_class(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "from_pretrained":
        return False
    reader = ast.unparse(call.func.value)
    return reader.rpartition(".")[2].startswith("Auto") or reader in ("loader", "class_for(written)")


def _says_whether_code_runs(call: ast.Call) -> bool:
    unpacked = any(word.arg is None and "settings" in ast.unparse(word.value) for word in call.keywords)
    return unpacked or any(word.arg == "trust_remote_code" for word in call.keywords)
