"""Writes the locks that the image installs from: every package at one version, with the hashes of its files.

    make lock

torch is not among them: which build it is depends on the index it comes from (`Dockerfile`), and with it the packages
of CUDA that it brings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"
OF_TORCH = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
HEADER = "# Made by `make lock`; do not edit. Linux, Python {}.\n"


def main() -> None:
    """Write both."""
    project = HERE.parent
    build_needs = re.search(r'^requires = \["([^"]+)"\]', (project / "pyproject.toml").read_text(), re.MULTILINE)
    assert build_needs is not None, "pyproject.toml says what builds it"
    locked = _compile("pyproject.toml", "--extra", "export", "--extra", "worker", "-c", "constraints.txt", cwd=project)
    (HERE / "requirements.lock").write_text(HEADER.format(PYTHON) + _without_torch(locked))
    built = _compile("-", cwd=project, given=build_needs[1])
    (HERE / "build.lock").write_text(HEADER.format(PYTHON) + built)


def _compile(*arguments: str, cwd: Path, given: str | None = None) -> str:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate"]
    command += ["--no-header", "--python-version", PYTHON, "--python-platform", PLATFORM, *arguments]
    return subprocess.run(command, cwd=cwd, input=given, capture_output=True, text=True, check=True).stdout


def _without_torch(locked: str) -> str:
    packages = re.split(r"^(?=[A-Za-z0-9])", locked, flags=re.MULTILINE)
    return "".join(package for package in packages if OF_TORCH.match(package) is None)


if __name__ == "__main__":
    main()
