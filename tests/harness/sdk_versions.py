"""Other versions of the official SDK, each in a virtual environment of its own, laid over the one that runs this."""

from __future__ import annotations

import json
from pathlib import Path

from harness.environment import overlaid_python
from harness.sdk_command_line import TIMEOUT_S, printed, start_sdk

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("sdk_script.py")


def sdk_python(version: str) -> Path:
    """Returns the Python that has this version of `tinker`; makes its environment first when there is none."""
    requirement = f"tinker=={version}"
    return overlaid_python(REPOSITORY / ".cache" / f"sdk-{version}-venv", install=(requirement,), made_from=requirement)


def run_sdk_script(
    version: str, *arguments: str, base_url: str, api_key: str, cwd: Path, timeout_s: float = TIMEOUT_S
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
    command = [sdk_python(version), SCRIPT, *arguments]
    done = start_sdk(command, base_url=base_url, api_key=api_key, home=cwd, timeout_s=timeout_s)
    seen: dict[str, object] = json.loads(printed(done).splitlines()[-1])
    return seen
