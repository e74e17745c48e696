"""Snippets that are marked ``run`` run: as they stand, from an empty folder, some against a service."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from harness.polling import wait_until
from harness.servers import free_port

HERE = Path(__file__).parent
TIMEOUT_S = 120


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


documents = load(HERE / "documents.py")
MARKED = [s for language in ("python", "bash") for s in documents.snippets(language=language) if s.needs]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """This process's own, with a ``twinkle`` on the PATH."""
    command = tmp_path_factory.mktemp("bin") / "twinkle"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m twinkle.cli "$@"\n')
    command.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TWINKLE_", "TINKER_"))}
    source = str(documents.ROOT / "src")
    return {**inherited, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": source}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A service without a model, and the variables a client needs for it."""
    folder, port = tmp_path_factory.mktemp("service"), free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ("--engine", "null", "--model", "my-model", "--home", str(folder / "home"), "--port", str(port))
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(["twinkle", "serve", *flags], env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: is_ready(url), what="the service is ready", deadline_s=TIMEOUT_S)
        key = re.search(rb"tml-\S+", (folder / "serve.log").read_bytes())
        assert key is not None
        yield {**environment, "TINKER_BASE_URL": url, "TINKER_API_KEY": key[0].decode()}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/readyz", timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("snippet", [s for s in MARKED if s.needs == "run"], ids=str)
def test_a_snippet_runs(snippet: object, environment: dict[str, str], tmp_path: Path) -> None:
    run(snippet, environment, tmp_path)


@pytest.mark.parametrize("snippet", [s for s in MARKED if s.needs == "run: server"], ids=str)
def test_a_snippet_runs_against_a_service(snippet: object, service: dict[str, str], tmp_path: Path) -> None:
    output = run(snippet, service, tmp_path)

    assert re.search(r"(tinker|twinkle)://", output)


def run(snippet: object, environment: dict[str, str], folder: Path) -> str:
    """Returns what it printed."""
    interpreter = {"python": [sys.executable, "-c"], "bash": ["bash", "-euc"]}[snippet.language]  # type: ignore[attr-defined]
    done = subprocess.run(
        [*interpreter, snippet.text],  # type: ignore[attr-defined]
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
