"""Who leaves a client or a thread behind is told so, and the tests after it are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
SAMPLE = """
import threading
import pytest
import tinker
from harness.leftovers import sdk_client
from harness.scripted_server import Reply, ScriptedServer
from twinkle.client import Client

KEY = "tml-" + "a" * 43

def answer(seen):
    return Reply(200, {"session_id": "beats", "type": "create_session"} if seen.path.endswith("session") else {})

@pytest.fixture(scope="session")
def url():
    with ScriptedServer(answer) as server:
        yield server.url

@pytest.fixture
def a_thread():
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="fixture's own")
    thread.start()
    yield
    may_end.set()

@pytest.fixture
def a_thread_for_ever():
    threading.Thread(target=threading.Event().wait, name="for ever", daemon=True).start()

def begin_session(client):
    client.create_lora_training_client("model")

def test_tidy(a_thread): pass
def test_with_a_fixture_that_is_not(a_thread_for_ever): pass
def test_that_is_not(): threading.Thread(target=threading.Event().wait, name="on and on", daemon=True).start()
def test_that_forgets_our_client(url): Client(url, KEY)
def test_that_closes_our_client(url):
    with Client(url, KEY): pass
def test_that_borrows_an_sdk_client(url): begin_session(sdk_client(url, KEY))
def test_last(): pass
"""
FORGETFUL = """
import tinker
from test_first import KEY, begin_session, url

def test_that_forgets_an_sdk_client(url): begin_session(tinker.ServiceClient(base_url=url, api_key=KEY))
def test_after_it(): pass
"""
DEAF = """
import asyncio
import threading
from tinker.lib import internal_client_holder

class InternalClientHolder:
    async def _session_heartbeat(self, session_id, beats):
        beats.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)

def test_whose_session_loses_its_end_once():
    loop = internal_client_holder._internal_client_holder_thread_singleton.get_loop()
    beats = threading.Event()
    told = asyncio.run_coroutine_threadsafe(InternalClientHolder()._session_heartbeat("deaf", beats), loop)
    assert beats.wait(60)
    told.cancel()
"""

HURRIED = ("-o", "leftovers_grace=0.5")


def test_a_thread_or_a_session_left_behind_fails_whoever_left_it(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(SAMPLE)
    (tmp_path / "test_second.py").write_text(FORGETFUL)
    (tmp_path / "test_deaf.py").write_text(DEAF)
    (tmp_path / "test_third.py").write_text("def test_innocent(): pass\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    path = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "harness.leftovers", "-p", "no:cacheprovider", "-v", "-rE", *HURRIED],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )

    said = done.stdout
    broken = [line.partition("::")[2].split(" ")[0] for line in said.splitlines() if line.startswith("ERROR")]
    assert sorted(broken) == [
        "test_after_it",
        "test_that_forgets_our_client",
        "test_that_is_not",
        "test_with_a_fixture_that_is_not",
    ], said
    assert "11 passed, 4 errors" in said
    assert "the fixture 'a_thread_for_ever' leaves threads behind: for ever" in said
    assert "the test 'test_that_is_not' leaves threads behind: on and on" in said
    assert "the test 'test_that_forgets_our_client' leaves threads behind: twinkle-client" in said
    assert "test_second.py leaves sessions of the SDK open: beats" in said
