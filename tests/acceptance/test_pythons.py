"""The queue on the Pythons that fresh machines have, in an environment without torch: its own tests pass there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from harness.environment import environment_python, interpreter_of

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = ["contract", *(f"unit/{room}" for room in ("cli", "client", "scheduler", "server", "tasks", "wire"))]
# They compare with torch, with our own sampler, or with what the SDK makes of tensors, which it does by torch; or they
# run the library, as processors do, or make a model.
NEED_TORCH = [
    "--ignore=tests/contract/test_custom_losses.py",
    "--ignore=tests/contract/test_prompt_sharing.py",
    "--ignore=tests/unit/cli/test_cli_data.py",
    "--ignore=tests/unit/cli/test_starts.py",
    "--ignore=tests/unit/server/test_custom_losses.py",
    "--ignore=tests/unit/server/test_file_clients.py",
    "--ignore=tests/unit/server/test_twinkle_processors.py",
    "--ignore=tests/unit/wire/test_loss_graph.py",
    "--ignore=tests/unit/wire/test_protobuf.py",
    "--deselect=tests/unit/wire/test_sampling.py::test_the_sdk_reads_a_complete_result_and_so_do_we",
    "--deselect=tests/unit/wire/test_tensors.py::test_a_sparse_tensor_survives_the_round_trip_and_the_sdk_reads_it",
    "--deselect=tests/unit/wire/test_tensors.py::test_json_tensors_of_the_sdk_are_read",
]
AT_LEAST = 1500
TESTS_TIMEOUT_S = 3000.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_queue_passes_its_tests_on(version: str) -> None:
    interpreter = interpreter_of(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine")

    def fill(python: Path) -> None:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-e", f"{REPOSITORY}[test]"], check=True)

    made_from = f"{interpreter.resolve()} {(REPOSITORY / 'pyproject.toml').read_text()}"
    python = environment_python(
        REPOSITORY / ".cache" / f"queue-venv-{version}", made_from=made_from, fill=fill, interpreter=interpreter
    )
    done = subprocess.run(
        [python, "-m", "pytest", *(f"tests/{path}" for path in TESTS), *NEED_TORCH, "-n", "2", "--dist", "loadfile"],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TESTS_TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-20_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= AT_LEAST, done.stdout
