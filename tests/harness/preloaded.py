"""Scripts in processes of their own, forked from one that has imported the libraries that all of them ask for.

To import torch, transformers, peft and datasets takes longer than a tiny model's training. Nothing of ours is imported
before the script asks for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from harness import preloaded_process
from twinkle.core.process.parent_death import dies_with

READ_AT_IMPORT = ("HF_", "MODELSCOPE_", "TRANSFORMERS_", "TORCH", "OMP_", "MKL_", "KMP_", "LD_", "PYTHON")
"""Prefixes of variables that libraries, or the interpreter, read once: who imports for a script has the script's."""


def run_preloaded(
    script: Path,
    environment: Mapping[str, str],
    *,
    folder: Path,
    arguments: Sequence[str],
    timeout_s: float,
) -> tuple[int, str]:
    """Run ``python SCRIPT ARGUMENT...``; its exit code, and what it said.

    Args:
        script: Its path.
        environment: All of it.
        folder: The working directory.
        arguments: Of the script.
        timeout_s: After which it is ended.

    Raises:
        subprocess.TimeoutExpired: It was.
    """
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    always = {name: environment[name] for name in ("PATH", "HOME", "TMPDIR", "LC_ALL") if name in environment}
    process = _preloaded(tuple(sorted({**always, **read}.items())))
    output = folder / "said.log"
    output.write_bytes(b"")
    order = {"script": str(script), "arguments": list(arguments), "folder": str(folder), "output": str(output)}
    order |= {"environment": dict(environment)}
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps({"order": order, "timeout_s": timeout_s}), file=process.stdin, flush=True)
    code = json.loads(process.stdout.readline() or '"the process that forks scripts has ended"')
    said = output.read_text(errors="replace")
    if code is None:
        raise subprocess.TimeoutExpired(str(script), timeout_s, said)
    return int(code), said


@cache
def _preloaded(environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """The process that has the libraries, of this environment; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, preloaded_process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(environment),
        preexec_fn=dies_with(os.getpid()),
    )
