"""What attacks cost another tenant: its steps and heartbeats before, during and after each, and the service's memory.

    python benchmarks/attacks.py [--short] [--output FILE]

One `twinkle serve --engine null`; the victim steps and keeps alive throughout, while one other tenant, or nobody in
particular, attacks from a process of its own. What is attacked is the queue, so no engine computes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import zstandard

from machine import load_average, machine_facts, write_result
from queue_overhead import RESULTS
from stack import TwinkleService, end_in_order_on_sigterm
from workload import BASE_MODEL

PACKAGES = ("uvicorn", "httptools", "fastapi", "httpx")
MIB = 2**20
NUM_THREADS = 8
NUM_IDLE = 2000
NUM_UNREAD = 25
PAUSE_S = 0.02
BEGIN_TIMEOUT_S = 120.0
LATE_STEP_S = 2.0
LATE_HEARTBEAT_S = 1.0
"""A step is late that takes so long beyond twice its usual time, a heartbeat that takes so long."""


@dataclass(frozen=True)
class Plan:
    """How long each part is measured."""

    window_s: float


FULL = Plan(window_s=10.0)
SHORT = Plan(window_s=3.0)


@dataclass(frozen=True)
class Target:
    """What is attacked, and as whom."""

    url: str
    key: str
    begun: Event
    stop: Event

    def client(self) -> httpx.Client:
        """Of the attacking tenant."""
        return httpx.Client(base_url=self.url, headers={"X-API-Key": self.key}, timeout=60, trust_env=False)

    def connect(self) -> socket.socket:
        """Of nobody in particular."""
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname, address.port), timeout=60)


Attack = Callable[[Target], None]


def slow_uploads(target: Target) -> None:
    """Bodies of 60 MiB that stop before their end."""
    address = urlsplit(target.url)
    while not target.stop.is_set():
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
        with suppress(OSError, http.client.HTTPException):
            connection.putrequest("POST", "/v1/chat/completions")
            connection.putheader("Content-Length", str(60 * MIB))
            connection.putheader("Authorization", f"Bearer {target.key}")
            connection.endheaders()
            for _ in range(59):
                connection.send(bytes(MIB))
            target.stop.wait(2.0)
        connection.close()


def endless_heads(target: Target) -> None:
    """Headers that do not end."""
    while not target.stop.is_set():
        with suppress(OSError), target.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\na: ")
            while not target.stop.is_set():
                connection.sendall(bytes(65536).replace(b"\0", b"a"))


def long_urls(target: Target) -> None:
    """Paths of 8 MiB."""
    url = b"GET /" + b"a" * (8 * MIB) + b" HTTP/1.1\r\n\r\n"
    while not target.stop.is_set():
        with suppress(OSError), target.connect() as connection:
            connection.sendall(url)
            connection.recv(1024)


def idle_connections(target: Target) -> None:
    """Connections that say nothing."""
    held: list[socket.socket] = []
    with suppress(OSError):
        held.extend(target.connect() for _ in range(NUM_IDLE))
    target.stop.wait()
    for connection in held:
        connection.close()


def lists(target: Target) -> None:
    """Whole pages of runs, and searches that find nothing."""
    with target.client() as client:
        while not target.stop.is_set():
            client.get("/api/v1/training_runs", params={"limit": 1000})
            client.post("/api/v1/sessions/search", json={"user_metadata": {"no": "such"}, "limit": 5})


def sessions(target: Target) -> None:
    """Sessions with all the tags they may have."""
    with target.client() as client:
        while not target.stop.is_set():
            client.post("/api/v1/create_session", json={"tags": ["a" * 4000] * 4})


def questions(target: Target) -> None:
    """What needs no key, again and again."""
    with httpx.Client(base_url=target.url, timeout=60, trust_env=False) as client:
        while not target.stop.is_set():
            client.get("/api/v1/livez")
            client.get("/openapi.json")


def bombs(target: Target) -> None:
    """A few kilobytes of zstd that become 64 MiB, for a route that takes one of them."""
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * MIB))
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}
    with target.client() as client:
        while not target.stop.is_set():
            for path in ("/api/v1/create_session", "/api/v1/asample"):
                client.post(path, content=bomb, headers=headers)


def many_keys(target: Target) -> None:
    """Bodies of a million keys."""
    body = b"{" + b",".join(b'"k%d":0' % number for number in range(1_000_000)) + b"}"
    with target.client() as client:
        while not target.stop.is_set():
            client.post("/api/v1/forward_backward", content=body)


def long_texts(target: Target) -> None:
    """Conversations of 5.5 MB, of one letter."""
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "a" * 5_500_000}]}
    headers = {"Authorization": f"Bearer {target.key}"}
    with target.client() as client:
        while not target.stop.is_set():
            client.post("/v1/chat/completions", json=body, headers=headers)


def unread_results(target: Target) -> None:
    """Large samples, whose results are asked for again and again and never read."""
    held: list[socket.socket] = []
    with target.client() as client, suppress(OSError, KeyError):
        session = client.post("/api/v1/create_session", json={}).json()["session_id"]
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        sampler = client.post("/api/v1/create_sampling_session", json=opened).json()["sampling_session_id"]
        sample = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 30_000},
            "num_samples": 32,
        }
        asked = json.dumps({"request_id": client.post("/api/v1/asample", json=sample).json()["request_id"]}).encode()
        head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: a\r\nX-API-Key: {target.key}\r\n"
        while not target.stop.is_set():
            if len(held) < NUM_UNREAD:
                held.append(target.connect())
                held[-1].sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
            else:
                target.stop.wait(0.1)
    for connection in held:
        connection.close()


ATTACKS: dict[str, Attack] = {
    "slow uploads": slow_uploads,
    "endless heads": endless_heads,
    "long URLs": long_urls,
    "idle connections": idle_connections,
    "lists and searches": lists,
    "sessions with tags": sessions,
    "questions without a key": questions,
    "compressed bombs": bombs,
    "a million keys": many_keys,
    "long texts": long_texts,
    "results that nobody reads": unread_results,
}


class Victim:
    """A tenant that steps one operation after the other, and sends heartbeats in between."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=120, trust_env=False)
        self._session = self._client.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": self._session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
        ticket = self._client.post("/create_model", json=body).json()
        self._run, self._seq = ticket["model_id"], 0
        self._collect(ticket["request_id"])

    def measure(self, seconds: float, *, usual: dict[str, float] | None = None) -> dict[str, float]:
        """Milliseconds of steps and heartbeats, and how many of them were late against the usual ones."""
        steps, beats = [], []
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            began = time.monotonic()
            self._seq += 1
            step = {"model_id": self._run, "seq_id": self._seq, "adam_params": {"learning_rate": 1e-4}}
            self._collect(self._accepted("/optim_step", step)["request_id"])
            steps.append(1000 * (time.monotonic() - began))
            began = time.monotonic()
            self._accepted("/session_heartbeat", {"session_id": self._session})
            beats.append(1000 * (time.monotonic() - began))
            time.sleep(PAUSE_S)
        latest_step_ms = 1000 * LATE_STEP_S + 2 * (usual["step_p50_ms"] if usual else statistics.median(steps))
        return {
            "num_steps": len(steps),
            "num_late_steps": sum(took > latest_step_ms for took in steps),
            "num_late_heartbeats": sum(took > 1000 * LATE_HEARTBEAT_S for took in beats),
            "step_p50_ms": round(statistics.median(steps), 1),
            "step_max_ms": round(max(steps), 1),
            "heartbeat_p50_ms": round(statistics.median(beats), 1),
            "heartbeat_max_ms": round(max(beats), 1),
        }

    def _accepted(self, path: str, body: dict[str, object]) -> dict[str, str]:
        while True:
            answer = self._client.post(path, json=body)
            if answer.status_code == httpx.codes.OK:
                told: dict[str, str] = answer.json()
                return told
            if answer.status_code not in (429, 503):
                raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
            time.sleep(0.2)

    def _collect(self, request_id: str) -> None:
        while True:
            answer = self._client.post("/retrieve_future", json={"request_id": request_id})
            if answer.status_code == httpx.codes.OK:
                return
            if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
                raise RuntimeError(f"{request_id}: {answer.status_code} {answer.text}")


def attack_from_threads(name: str, target: Target) -> None:
    """The attack of this name from several threads, until it is to stop."""
    threads = [threading.Thread(target=ATTACKS[name], args=(target,), daemon=True) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    target.begun.set()
    for thread in threads:
        thread.join()


@contextmanager
def under(name: str, url: str, key: str) -> Iterator[None]:
    """The attack of this name for the length of the block, in a process of its own.

    The victim does not wait for the attacker's interpreter.
    """
    context = multiprocessing.get_context("spawn")
    target = Target(url, key, context.Event(), context.Event())
    attacker = context.Process(target=attack_from_threads, args=(name, target), daemon=True)
    attacker.start()
    try:
        if not target.begun.wait(BEGIN_TIMEOUT_S):
            raise RuntimeError(f"the attack did not begin: {name}")
        yield
    finally:
        target.stop.set()
        attacker.join(timeout=30)
        attacker.kill()
        attacker.join()


def measure(plan: Plan) -> dict[str, object]:
    """Runs the whole plan; returns the result file's content."""
    machine, load_before = machine_facts(PACKAGES), load_average()
    cells = []
    with (
        tempfile.TemporaryDirectory(prefix="twinkle-bench-") as home,
        TwinkleService(Path(home) / "twinkle", model=BASE_MODEL, engine="null") as service,
    ):
        victim = Victim(service.url, service.create_key("victim"))
        attacker = service.create_key("attacker")
        victim.measure(plan.window_s)
        # Made once, at the first question, and kept: it is no growth under an attack.
        httpx.get(f"{service.url}/openapi.json", timeout=60).raise_for_status()
        for name in ATTACKS:
            before, memory_before = victim.measure(plan.window_s), service.rss_bytes()
            with under(name, service.url, attacker):
                during, memory_during = victim.measure(plan.window_s, usual=before), service.rss_bytes()
            after, memory_after = victim.measure(plan.window_s, usual=before), service.rss_bytes()
            cells.append(
                {
                    "attack": name,
                    "before": before,
                    "during": during,
                    "after": after,
                    "mib": {
                        role: [round(seen.get(role, 0) / MIB) for seen in (memory_before, memory_during, memory_after)]
                        for role in memory_before
                    },
                }
            )
            print(json.dumps(cells[-1]), flush=True)
    return {
        "benchmark": "attacks",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {"threads": NUM_THREADS, "idle_connections": NUM_THREADS * NUM_IDLE, "window_s": plan.window_s},
        "cells": cells,
    }


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="shorter windows")
    parser.add_argument("--output", type=Path, default=RESULTS / "attacks.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    result = measure(SHORT if arguments.short else FULL)
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
