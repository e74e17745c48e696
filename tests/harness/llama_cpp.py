"""An environment with llama.cpp, built from its sources, and what it computes of a GGUF file."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from harness.environment import environment_python

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("llama-cpp-requirements.txt")
CACHE = REPOSITORY / ".cache" / "llama-cpp-venv"
BUILD = "-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF"
TIMEOUT_S = 120.0
SCRIPT = """
import json, sys
from llama_cpp import Llama
asked = json.loads(sys.argv[1])
model = Llama(model_path=asked["model"], lora_path=asked["adapter"], n_ctx=256, logits_all=True, verbose=False,
              n_threads=1)
model.eval(asked["tokens"])
print(json.dumps({
    "logits": model.scores[: len(asked["tokens"])].tolist(),
    "tokens": model.tokenize(asked["text"].encode(), add_bos=True, special=True),
}))
"""


def llama_cpp_python(cache: Path = CACHE) -> Path:
    """Returns the Python of the environment with llama.cpp; makes it first when there is none."""

    def fill(python: Path) -> None:
        environment = {**os.environ, "CMAKE_ARGS": BUILD, "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-r", REQUIREMENTS], check=True, env=environment)

    return environment_python(cache, made_from=REQUIREMENTS.read_text(), fill=fill)


def run_llama_cpp(model: Path, tokens: list[int], text: str, *, adapter: Path | None = None) -> dict[str, list]:
    """What llama.cpp computes: ``logits`` after each of the tokens, and the ``tokens`` of a text."""
    asked = {"model": str(model), "adapter": None if adapter is None else str(adapter), "tokens": tokens, "text": text}
    done = subprocess.run(
        [llama_cpp_python(), "-c", SCRIPT, json.dumps(asked)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
