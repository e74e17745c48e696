"""How much of the time a device waits for the queue: a mesh's worker on an engine that takes 5 ms for each pass.

    python benchmarks/device_wait.py [--short] [--database URL] [--output FILE]

The worker, the journal, the broker and the lease are the service's own; the engine sleeps, as a host does that waits
for its device, and computes nothing. A pass is one operation's; several that go together take 5 ms each. What every
adapter does, a forward_backward and an optimizer step in turn, is in the journal beforehand, so what is measured is the
worker alone. ``in_execute`` is the share of the time from the first pass to the end of the last in which the engine was
at a pass, or at an optimizer step, which is a device's work as well and takes this engine no more than its call
(``step_ms`` each); ``of_device`` counts 5 ms for each pass and nothing for a step, whatever the process made of them,
and is never the higher one. ``loop_cpu_ms_per_pass`` is what the loop's thread computes while the engine is at nothing:
a load changes it less than the shares.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from celery import Celery

from machine import load_average, machine_facts, write_result
from measures import rounded
from scale_world import broker, new_database
from twinkle.core.adapter import AdapterConfig
from twinkle.core.clock import SystemClock
from twinkle.core.lease import ProcessIdentity
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.scheduler.token_stream import TokenPublisher
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.disks import Disks
from twinkle.storage.journal.records import NewAdapter
from twinkle.storage.stores import Stores
from twinkle.storage.tenants.sessions import NewSession
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.training import ForwardBackwardBody, WireDatum, encode_forward_backward
from twinkle.workers.assembly import Surroundings, WorkerOptions, WorkerParts
from twinkle.workers.clerk import OneThread
from twinkle.workers.engine import Pass, PassAnswer
from twinkle.workers.engines.null_engine import NullEngine, NullState
from twinkle.workers.report import OperationReporter
from twinkle.workers.sampling.sampling import CacheGroups

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("celery", "redis", "psycopg", "numpy", "protobuf")
PASS_S = 0.005
NUM_DATUMS = 4
TOKENS_PER_DATUM = 64
GOALS = {1: 0.90, 16: 0.97}
SESSION = NewSession(
    tags=[], user_metadata=None, project_id=None, display_name="", sdk_version="", idempotency_key=None
)
_APPENDED_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True)
class Load:
    """So many tenants with an adapter each, and how many steps each has queued."""

    tenants: int
    steps: int


FULL = (Load(tenants=1, steps=800), Load(tenants=4, steps=200), Load(tenants=16, steps=50))
SHORT = (Load(tenants=1, steps=200), Load(tenants=16, steps=12))


class PacedEngine(NullEngine):
    """Takes its time for each pass, and knows how long it was at them."""

    def __init__(self) -> None:
        super().__init__(base_model="null", max_rank=32)
        self.num_passes = 0
        self.num_steps = 0
        self.in_passes_s = 0.0
        self.in_steps_s = 0.0
        self.began_at: float | None = None
        self.ended_at = 0.0
        self.loop_cpu_s = 0.0
        self._cpu_s = 0.0

    def run_passes(self, passes: Sequence[Pass[NullState]]) -> list[PassAnswer]:
        """As long as a device would be at them."""
        began_at = self._begin()
        time.sleep(PASS_S * len(passes))
        answers = super().run_passes(passes)
        self.in_passes_s += self._end() - began_at
        self.num_passes += len(passes)
        return answers

    def optim_step(self, state: NullState, params: AdamParams) -> dict[str, float]:
        """At once."""
        began_at = self._begin()
        metrics = super().optim_step(state, params)
        self.in_steps_s += self._end() - began_at
        self.num_steps += 1
        return metrics

    def _begin(self) -> float:
        now, cpu_s = time.perf_counter(), time.thread_time()
        if self.began_at is None:
            self.began_at = now
        else:
            self.loop_cpu_s += cpu_s - self._cpu_s
        return now

    def _end(self) -> float:
        self._cpu_s = time.thread_time()
        self.ended_at = time.perf_counter()
        return self.ended_at


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer steps")
    parser.add_argument("--database", help="a PostgreSQL server's URL instead of SQLite")
    parser.add_argument("--output", type=Path, default=RESULTS / "device_wait.json")
    arguments = parser.parse_args()
    machine, load_before = machine_facts(PACKAGES), load_average()
    cells = []
    for load in SHORT if arguments.short else FULL:
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinkle-bench-")))
            redis_url = stack.enter_context(broker(home))
            database_url = stack.enter_context(new_database(home, arguments.database))
            cell = measure(load, home, redis_url=redis_url, database_url=database_url)
            print(json.dumps(cell), file=sys.stderr)
            cells.append(cell)
    result = {
        "benchmark": "device_wait",
        "machine": machine,
        "load_average_before": load_before,
        "pass_ms": PASS_S * 1000,
        "batch": {"datums": NUM_DATUMS, "tokens_per_datum": TOKENS_PER_DATUM},
        "database": "sqlite" if arguments.database is None else "postgresql",
        "cells": cells,
    }
    write_result(arguments.output, result)


def measure(load: Load, home: Path, *, redis_url: str, database_url: str) -> dict[str, object]:
    """One load from an empty journal to the last outcome."""
    clock = SystemClock()
    settings = Settings.model_validate({"engine": "null", "redis_url": redis_url, "home": str(home)})
    stores = Stores.at(database_url, clock)
    engine = PacedEngine()
    around = Surroundings(
        stores=stores,
        journal=stores.journal,
        blobs=open_blob_store(f"file://{home / 'objects'}"),
        clock=clock,
        identity=ProcessIdentity.current(),
        capabilities=engine.capabilities,
        publisher=CompletionPublisher(redis_url),
        token_publisher=TokenPublisher(redis_url),
        reporter=OperationReporter(Celery(broker=redis_url), "benchmark", name_of_tenant=stores.tenants.name_of),
        cache_groups=CacheGroups({}, stores.tenants.name_of),
        threads=ThreadPoolExecutor(settings.transfer_threads),
        clerk=OneThread("clerk"),
        disks=Disks([], clock, low_bytes=0, critical_bytes=0),
        teller=ThreadPoolExecutor(1),
    )
    parts = WorkerParts[NullState](engine, around, WorkerOptions.of(settings))
    _fill(stores, load, mesh=settings.mesh)
    if parts.keeper.try_acquire() is None:
        raise RuntimeError("somebody else holds the mesh")
    around.reporter.start()
    cpu_before_s = time.process_time()
    while parts.worker.drain(budget_s=1.0):
        pass
    cpu_s = time.process_time() - cpu_before_s
    parts.worker.close()
    parts.transfers.close()
    num_passes = load.tenants * load.steps
    if engine.num_passes != num_passes or engine.num_steps != num_passes or engine.began_at is None:
        done = f"{engine.num_passes} passes and {engine.num_steps} optimizer steps"
        raise RuntimeError(f"{done} were executed, {num_passes} of each were queued")
    elapsed_s = engine.ended_at - engine.began_at
    in_execute = (engine.in_passes_s + engine.in_steps_s) / elapsed_s
    return {
        "tenants": load.tenants,
        "passes": num_passes,
        "elapsed_s": rounded(elapsed_s),
        "in_execute": rounded(in_execute),
        "of_device": rounded(num_passes * PASS_S / elapsed_s),
        "goal": GOALS.get(load.tenants),
        "step_ms": rounded(engine.in_steps_s * 1000 / engine.num_steps),
        "loop_cpu_ms_per_pass": rounded(engine.loop_cpu_s * 1000 / num_passes),
        "cpu_ms_per_operation": rounded(cpu_s * 1000 / (2 * num_passes)),
    }


def _fill(stores: Stores, load: Load, *, mesh: str) -> None:
    clock = SystemClock()
    config = AdapterConfig(base_model="null", rank=8, seed=1)
    submissions: list[Submission] = []
    for number in range(load.tenants):
        key = stores.tenants.key(stores.tenants.create_key(f"tenant-{number}", "key"))
        assert key is not None
        session = stores.sessions.open(key.tenant, SESSION)
        name = f"{session}:train:0"
        adapter = NewAdapter(
            id=name,
            tenant=key.tenant,
            session=session,
            mesh=mesh,
            config=config,
            optimizer={"type": "adamw"},
            user_metadata=None,
            created_at=clock.now(),
        )
        body = config.model_dump_json().encode()
        stores.journal.open_lane(adapter, _submission(key.tenant, name, 0, OperationKind.CREATE_MODEL, body))
        for step in range(load.steps):
            seq = 2 * step + 1
            submissions.append(_pass(key.tenant, name, seq))
            rate = json.dumps({"model_id": name, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-3}}).encode()
            submissions.append(_submission(key.tenant, name, seq + 1, OperationKind.OPTIM_STEP, rate))
    for start in range(0, len(submissions), _APPENDED_AT_ONCE):
        stores.journal.append(submissions[start : start + _APPENDED_AT_ONCE])


def _pass(tenant: str, adapter: str, seq: int) -> Submission:
    tokens = np.arange(TOKENS_PER_DATUM, dtype=np.int64)
    weights = np.ones(TOKENS_PER_DATUM, dtype=np.float32)
    data = tuple(WireDatum(tokens, {"target_tokens": tokens, "weights": weights}) for _ in range(NUM_DATUMS))
    body = ForwardBackwardBody(
        model_id=adapter, seq_id=seq, forward_only=False, loss_fn="cross_entropy", loss_fn_config={}, data=data
    )
    num_tokens = NUM_DATUMS * TOKENS_PER_DATUM
    return _submission(
        tenant, adapter, seq, OperationKind.FORWARD_BACKWARD, encode_forward_backward(body), num_tokens=num_tokens
    )


def _submission(
    tenant: str, adapter: str, seq: int, kind: OperationKind, body: bytes, *, num_tokens: int = 0
) -> Submission:
    return Submission(
        tenant=tenant,
        lane=adapter,
        seq=seq,
        kind=kind,
        digest=sha256(body).hexdigest(),
        payload=Payload(inline=body),
        num_tokens=num_tokens,
    )


if __name__ == "__main__":
    main()
