"""An environment with vLLM for the CPU, and pytest in it.

3.5 GB, some minutes. It has this project installed from its sources, so it is made again only when vLLM's own
requirements change.

    PYTHONPATH=tests python -m harness.vllm [PYTEST ARGUMENT ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.environment import environment_python

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("vllm-requirements.txt")
CACHE = REPOSITORY / ".cache" / "vllm-venv"
# They come with vLLM, built for other versions of torch, and transformers fails when it finds them broken.
BROKEN = ("torchvision", "torchaudio", "torchcodec")
TESTS_TIMEOUT_S = 900.0


def vllm_python(cache: Path = CACHE) -> Path:
    """Returns the Python of the environment with vLLM; makes it first when there is none."""

    def fill(python: Path) -> None:
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        # In two steps: a resolver that sees torch asked for by others alone would choose a build with CUDA.
        subprocess.run([*pip, "install", "-r", REQUIREMENTS], check=True)
        subprocess.run([*pip, "install", "-r", REQUIREMENTS, "-e", f"{REPOSITORY}[worker]"], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *BROKEN], check=True)

    return environment_python(cache, made_from=REQUIREMENTS.read_text(), fill=fill)


def run_pytest(arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Runs pytest in that environment, with the conftest of the tests' own folder alone, and returns how it ended."""
    # One thread: vLLM's spin while they wait, which a busy machine makes slow beyond measure.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.run(
        [vllm_python(), "-m", "pytest", "--confcutdir=tests/unit/sampler", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TESTS_TIMEOUT_S,
        check=False,
    )


if __name__ == "__main__":
    done = run_pytest(sys.argv[1:])
    print(done.stdout)
    sys.exit(done.returncode)
