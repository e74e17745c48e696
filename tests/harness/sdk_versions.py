"""Other versions of the official SDK, each in a virtual environment of its own, laid over the one that runs this."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from harness.environment import overlaid_python

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("sdk_script.py")
SCRIPT_TIMEOUT_S = 120.0


def sdk_python(version: str) -> Path:
    """Returns the Python that has this version of `tinker`; makes its environment first when there is none."""
    requirement = f"tinker=={version}"
    return overlaid_python(REPOSITORY / ".cache" / f"sdk-{version}-venv", install=(requirement,), made_from=requirement)


def run_sdk_script(
    version: str, *arguments: str, base_url: str, api_key: str, cwd: Path, timeout_s: float = SCRIPT_TIMEOUT_S
) -> dict[str, object]:
    """Runs `sdk_script.py` under one version of the SDK and returns what it printed.

    Args:
        version: Of `tinker`.
        arguments: The script's.
        base_url: The service.
        api_key: A tenant's key.
        cwd: An empty folder; the script's home.
        timeout_s: After this it is killed and `subprocess.TimeoutExpired` raised.

    Raises:
        AssertionError: It failed; holds what it said.
    """
    command = [str(SCRIPT), *arguments]
    printed = _run(version, command, base_url=base_url, api_key=api_key, cwd=cwd, timeout_s=timeout_s)
    seen: dict[str, object] = json.loads(printed.splitlines()[-1])
    return seen


def run_command_line(version: str, *arguments: str, base_url: str, api_key: str, cwd: Path) -> str:
    """Runs the `tinker` command of one version of the SDK and returns what it printed; raises as the above does."""
    command = ["-m", "tinker.cli", *arguments]
    return _run(version, command, base_url=base_url, api_key=api_key, cwd=cwd, timeout_s=SCRIPT_TIMEOUT_S)


def _run(version: str, command: list[str], *, base_url: str, api_key: str, cwd: Path, timeout_s: float) -> str:
    # Nothing of the caller's keys, proxies or Python paths.
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    environment |= {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": api_key, "HOME": str(cwd)}
    done = subprocess.run(
        [sdk_python(version), *command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"tinker {version}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout
