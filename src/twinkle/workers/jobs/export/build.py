"""One export, step by step, in a process of its own. Steps can be repeated: what lies there whole is not written again.

The folder of an export holds a folder for each form, and beside them notes of what each step has written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from twinkle.checkpoint_engine.peft_settings import read_settings
from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.file_names import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from twinkle.hub.support import architecture_of
from twinkle.workers.jobs.export.gguf_files import GgufAdapter, GgufModel
from twinkle.workers.jobs.export.merged import MergedModel
from twinkle.workers.jobs.export.ollama import MODELFILE, modelfile
from twinkle.workers.jobs.export.requests import ExportForm, ExportOutline, ExportRequest, WrittenFile, sha256_of
from twinkle.workers.jobs.export.skeleton import CONFIG_FILE as BASE_CONFIG
from twinkle.workers.jobs.export.skeleton import Skeleton, open_skeleton
from twinkle.workers.jobs.export.tensor_files import TensorFolder
from twinkle.workers.jobs.export.updates import TrainedWeight, read_adapter
from twinkle.workers.jobs.export.verification import (
    Meant,
    check_gguf,
    check_gguf_adapter,
    check_merged,
    check_peft,
    what_is_meant,
)

QUANTIZED = "gguf-q8_0"
MODEL_GGUF, ADAPTER_GGUF = "model.gguf", "adapter.gguf"
_NOTES = ".steps"
_CONFIG_STEP = "merged/others"
_VERIFYING_FACTOR = 4.5
"""Bytes for each weight while its logits are computed: float32, and what that takes besides."""


def outline_of(request: ExportRequest) -> ExportOutline:
    """What is to be done.

    Raises:
        ConfigError: It cannot be done for this model, by its name and with the reason.
        InvalidInput: The adapter does not fit the base model.
    """
    return _opened(request).outline()


def take_step(request: ExportRequest, step: str) -> list[WrittenFile]:
    """Do one step, unless what it writes lies there whole; the files."""
    return _opened(request).take(step)


def verify_form(request: ExportRequest, form: ExportForm) -> dict[str, float]:
    """Read one form back, and compare it; the figures.

    Raises:
        StorageUnavailable: It is not what was meant.
    """
    return _opened(request).verify(form)


class _Export:
    def __init__(self, request: ExportRequest) -> None:
        self._request = request
        self._base, self._folder = Path(request.base), Path(request.folder)
        self._adapter = Path(request.adapter)
        self._files = {
            name: (self._adapter / name).read_bytes() for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)
        }

    @cached_property
    def _skeleton(self) -> Skeleton:
        return open_skeleton(self._base)

    @cached_property
    def _weights(self) -> list[TrainedWeight]:
        return read_adapter(self._skeleton, self._files)

    @cached_property
    def _is_known(self) -> bool:
        """Whether the base model can be taken apart. An adapter alone is exported for any."""
        try:
            _ = self._skeleton
        except ConfigError:
            return False
        return True

    @cached_property
    def _merged(self) -> MergedModel:
        return MergedModel(TensorFolder(self._base), self._skeleton, self._weights)

    @cached_property
    def _gguf(self) -> GgufModel:
        return GgufModel(self._merged, self._skeleton, self._base, name=self._request.name)

    @cached_property
    def _gguf_in_blocks(self) -> GgufModel:
        return GgufModel(self._merged, self._skeleton, self._base, name=self._request.name, is_quantized=True)

    @cached_property
    def _gguf_adapter(self) -> GgufAdapter:
        return GgufAdapter(self._skeleton, self._weights)

    @cached_property
    def _meant(self) -> Meant:
        in_blocks = QUANTIZED in self._request.forms
        return what_is_meant(self._base, self._adapter, self._merged, self._weights, in_blocks=in_blocks)

    @property
    def _steps(self) -> dict[str, Callable[[], Sequence[str]]]:
        """By their names what does them and says which files it has written."""
        steps: dict[str, Callable[[], Sequence[str]]] = {}
        forms = self._request.forms
        if "peft" in forms:
            steps["peft"] = self._write_peft
        if "merged" in forms:
            steps |= {f"merged/{file}": self._shard_writer(file) for file in self._merged.files}
            steps[_CONFIG_STEP] = self._write_others
        if "gguf" in forms or "ollama" in forms:
            steps["gguf"] = self._write_gguf
        if QUANTIZED in forms:
            steps[QUANTIZED] = self._write_quantized
        if "ollama" in forms:
            steps["ollama"] = self._write_modelfile
        if "gguf-adapter" in forms:
            steps["gguf-adapter"] = self._write_gguf_adapter
        return steps

    def outline(self) -> ExportOutline:
        forms = set(self._request.forms)
        adapter_bytes = len(self._files[ADAPTER_WEIGHTS_FILE])
        size_bytes = adapter_bytes * len(forms & {"peft", "gguf-adapter"})
        if forms & {"gguf", "ollama"}:
            _ = self._gguf
        if "gguf-adapter" in forms:
            _ = self._gguf_adapter
        if QUANTIZED in forms:
            _ = self._gguf_in_blocks
        # Blocks are about half as large as numbers of 16 bits; that is not counted on.
        num_models = ("merged" in forms) + bool(forms & {"gguf", "ollama"}) + (QUANTIZED in forms)
        if num_models:
            self._check_memory()
            size_bytes += num_models * self._merged.size_bytes
        if forms != {"peft"} or self._is_known:
            _ = self._weights  # which do not fit every base model
            architecture = self._skeleton.architecture
        else:
            read_settings(self._files[ADAPTER_CONFIG_FILE])
            architecture = architecture_of(json.loads((self._base / BASE_CONFIG).read_text()))
        return ExportOutline(architecture=architecture, steps=tuple(self._steps), size_bytes=size_bytes)

    def _check_memory(self) -> None:
        num_weights = sum(parameter.numel() for parameter in self._skeleton.model.parameters())
        needed = int(num_weights * _VERIFYING_FACTOR)
        if self._request.compares_logits and needed > self._request.memory_bytes:
            raise ConfigError(
                f"{self._skeleton.architecture} has {num_weights} weights: comparing its logits takes {needed} bytes,"
                f" and {self._request.memory_bytes} may be (TWINKLE_EXPORT_MEMORY_BYTES); send verify='files' to have"
                " its files checked without computing with them"
            )

    def take(self, step: str) -> list[WrittenFile]:
        note = self._folder / _NOTES / f"{step.replace('/', '--')}.json"
        written = _intact(note, self._folder)
        if written is None:
            written = [self._described(path) for path in self._steps[step]()]
            note.parent.mkdir(parents=True, exist_ok=True)
            temporary = note.with_suffix(".part")
            temporary.write_text(json.dumps([asdict(file) for file in written]))
            temporary.rename(note)
        return written

    @torch.no_grad()
    def verify(self, form: ExportForm) -> dict[str, float]:
        if form == "gguf-adapter":
            return check_gguf_adapter(self._folder / form / ADAPTER_GGUF, self._gguf_adapter, self._weights)
        if form == "peft" and self._is_known:
            return check_peft(self._folder / form, self._skeleton)
        if form == "peft" or not self._request.compares_logits:
            return {"files": float(len(self._checked("gguf" if form == "ollama" else form)))}
        if form == "merged":
            return check_merged(self._folder / form, self._meant)
        if form == QUANTIZED:
            return check_gguf(self._folder / form / MODEL_GGUF, self._skeleton, self._meant, in_blocks=True)
        return check_gguf(self._folder / "gguf" / MODEL_GGUF, self._skeleton, self._meant)

    def _checked(self, form: str) -> list[WrittenFile]:
        """The files of a form, read again.

        Raises:
            StorageUnavailable: One is not what was written.
        """
        files: list[WrittenFile] = []
        for note in sorted((self._folder / _NOTES).glob("*.json")):
            if note.stem.split("--")[0] == form:
                written = _intact(note, self._folder)
                if written is None:
                    raise StorageUnavailable(f"files of {form} do not read back as they were written; check the disk")
                files += written
        return files

    def _described(self, path: str) -> WrittenFile:
        file = self._folder / path
        return WrittenFile(path=path, size_bytes=file.stat().st_size, sha256=sha256_of(file))

    def _within(self, form: str) -> Path:
        folder = self._folder / form
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write_peft(self) -> list[str]:
        for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE):
            shutil.copyfile(self._adapter / name, self._within("peft") / name)
        return [f"peft/{ADAPTER_CONFIG_FILE}", f"peft/{ADAPTER_WEIGHTS_FILE}"]

    def _shard_writer(self, file: str) -> Callable[[], Sequence[str]]:
        def write() -> list[str]:
            self._merged.write(file, self._within("merged"))
            return [f"merged/{file}"]

        return write

    def _write_others(self) -> list[str]:
        return [f"merged/{name}" for name in self._merged.write_others(self._within("merged"))]

    def _write_gguf(self) -> list[str]:
        self._gguf.write(self._within("gguf") / MODEL_GGUF)
        return [f"gguf/{MODEL_GGUF}"]

    def _write_quantized(self) -> list[str]:
        self._gguf_in_blocks.write(self._within(QUANTIZED) / MODEL_GGUF)
        return [f"{QUANTIZED}/{MODEL_GGUF}"]

    def _write_modelfile(self) -> list[str]:
        text = modelfile(MODEL_GGUF, self._gguf.vocabulary.chat_template)
        (self._within("gguf") / MODELFILE).write_text(text, encoding="utf-8")
        return [f"gguf/{MODELFILE}"]

    def _write_gguf_adapter(self) -> list[str]:
        self._gguf_adapter.write(self._within("gguf-adapter") / ADAPTER_GGUF)
        return [f"gguf-adapter/{ADAPTER_GGUF}"]


@lru_cache(maxsize=1)
def _opened(request: ExportRequest) -> _Export:
    return _Export(request)


def _intact(note: Path, folder: Path) -> list[WrittenFile] | None:
    """What a step has written, if all of it lies there as it was."""
    if not note.is_file():
        return None
    written: Sequence[Mapping[str, object]] = json.loads(note.read_text())
    files = [WrittenFile(**entry) for entry in written]  # type: ignore[arg-type]
    for file in files:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.size_bytes or sha256_of(path) != file.sha256:
            return None
    return files
