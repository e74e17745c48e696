"""Checkpoints as directories that appear complete and verified, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch

from twinkle.core.errors import InvalidInput, StorageUnavailable


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """An empty directory beside ``target`` that takes its place when the block has ended without an error.

    What was at ``target`` before is moved aside first and removed last.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield staging
        staging.chmod(0o755)
        _flush_directory(staging)
        aside = staging.with_name(f"{staging.name}-old")
        if target.exists():
            target.rename(aside)
        staging.rename(target)
        _flush_directory(target.parent)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to disk, and read each back.

    Raises:
        StorageUnavailable: What is read is not what was written.
    """
    for name, content in files.items():
        path = folder / name
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != content:
            raise StorageUnavailable(f"{path} does not read back as it was written; check the disk")


def verify_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare the safetensors files of a folder with what was to be stored; names left out by the writer do not count.

    Raises:
        StorageUnavailable: A tensor differs.
    """
    for path in sorted(folder.glob("*.safetensors")):
        for name, stored in safetensors.torch.load_file(path).items():
            if name in tensors and not torch.equal(stored, tensors[name].detach().cpu()):
                raise StorageUnavailable(f"{path}: {name} does not read back as it was written; check the disk")


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint.

    Raises:
        InvalidInput: There is no such directory.
    """
    if not folder.is_dir():
        raise InvalidInput("checkpoint", f"{folder} is not a directory")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _flush_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
