"""Safetensors on the disk, one tensor in memory at a time: what a base model's files hold, and files like them.

A file is eight bytes with the length of its header, the header as JSON, and the tensors one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from twinkle.core.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
METADATA = {"format": "pt"}
"""What transformers wants a file to say of itself."""

_LENGTH_BYTES = 8
_PIECE_BYTES = 2**24
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return self.end - self.start


class TensorFolder:
    """The safetensors files of a model's folder, by the tensors in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = check_weight_files(folder)
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            self.tensors |= _read_header(folder / file, file)

    def of_file(self, file: str) -> list[StoredTensor]:
        """The tensors of a file, in the order in which they lie in it."""
        return sorted((t for t in self.tensors.values() if t.file == file), key=lambda tensor: tensor.start)

    def dtype(self, name: str) -> torch.dtype:
        """The numbers a tensor is stored in.

        Raises:
            ConfigError: They are of a kind that is not computed with here.
        """
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise ConfigError(f"{name} holds numbers of type {stored.dtype}, which cannot be read here")
        return _DTYPES[stored.dtype]

    def read(self, name: str) -> torch.Tensor:
        """One tensor; raises as :meth:`dtype` does."""
        dtype, stored = self.dtype(name), self.tensors[name]
        with (self.folder / stored.file).open("rb") as file:
            file.seek(stored.start)
            data = bytearray(file.read(stored.size_bytes))
        return (
            torch.frombuffer(data, dtype=dtype).view(stored.shape) if data else torch.empty(stored.shape, dtype=dtype)
        )


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a file that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return _DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


def write_tensor_file(path: Path, tensors: Sequence[PlannedTensor], make: Callable[[str], torch.Tensor]) -> str:
    """Write a file, a tensor at a time; its SHA-256. It has its name once it is whole and on the disk."""
    header: dict[str, object] = {"__metadata__": METADATA}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.size_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _LENGTH_BYTES)
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        writer = _HashingWriter(file)
        writer.write(len(head).to_bytes(_LENGTH_BYTES, "little") + head)
        for tensor in tensors:
            made = make(tensor.name)
            if tuple(made.shape) != tensor.shape or made.dtype != _DTYPES[tensor.dtype]:
                raise ConfigError(f"{tensor.name} came out as {made.dtype} {tuple(made.shape)}, not as it was planned")
            writer.write(bytes_of(made))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    return writer.sha256


def write_index(path: Path, files: Mapping[str, Sequence[PlannedTensor]]) -> None:
    """Write the index of a model in several files."""
    weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    total = sum(tensor.size_bytes for tensors in files.values() for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class _HashingWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._file.write(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """What a tensor's numbers are in memory."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data


def check_weight_files(folder: Path) -> list[str]:
    """The names of the files with a model's weights.

    Raises:
        ConfigError: They are of another kind, or some are missing.
    """
    files = _weight_files(folder)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ConfigError(f"the base model lacks {missing[0]}, which its index names")
    return files


def _weight_files(folder: Path) -> list[str]:
    index = folder / INDEX_FILE
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    raise ConfigError(
        f"the base model has no {SINGLE_FILE} and no index of several; weights in other files are not merged:"
        " export the adapter alone, as peft"
    )


def _read_header(path: Path, file: str) -> dict[str, StoredTensor]:
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        header = json.loads(opened.read(length))
    begins = _LENGTH_BYTES + length
    return {
        name: StoredTensor(
            name=name,
            file=file,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=begins + entry["data_offsets"][0],
            end=begins + entry["data_offsets"][1],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
