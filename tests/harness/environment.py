"""Virtual environments for tests that need packages this project does not want in its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

_OWN_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def environment_python(
    cache: Path, *, made_from: str, fill: Callable[[Path], None], interpreter: str | Path = sys.executable
) -> Path:
    """Returns the Python of the environment in `cache`; makes it first when there is none.

    It is made again when `made_from` has changed, and one that was not finished is not used.

    Args:
        cache: Its folder. One process makes it, others wait.
        made_from: Whatever decides its content.
        fill: Installs into an empty environment, given its Python.
        interpreter: What it is made with.
    """
    stamp = cache / "made-from.sha256"
    wanted = hashlib.sha256(made_from.encode()).hexdigest()
    python = cache / "bin" / "python"
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.with_name(f"{cache.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.is_file() and stamp.read_text() == wanted):
            subprocess.run([interpreter, "-m", "venv", "--clear", cache], check=True)
            fill(python)
            stamp.write_text(wanted)
    return python


def interpreter_of(version: str) -> Path | None:
    """A Python of this version (as 3.12) on this machine, on the PATH or kept by pyenv; ``None`` if there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    for found in ([] if on_path is None else [Path(on_path)]) + sorted(root.glob(f"versions/{version}.*/bin/python")):
        # pyenv's shim is there for versions that it does not run.
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def overlaid_python(cache: Path, *, install: Sequence[str | Path], made_from: str) -> Path:
    """Returns the Python of an environment laid over the one that runs this: its own packages come first.

    Args:
        cache: Its folder.
        install: pip's arguments, installed without their dependencies: those are below.
        made_from: Whatever decides its content, besides the environment below.
    """
    below = sysconfig.get_path("purelib")

    def fill(python: Path) -> None:
        asked = subprocess.run([python, "-c", _OWN_PACKAGES], check=True, capture_output=True, text=True)
        (Path(asked.stdout.strip()) / "below.pth").write_text(f"{below}\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *install], check=True)

    return environment_python(cache, made_from=made_from + below, fill=fill)
