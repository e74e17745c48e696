"""What saves on a slow object store cost everybody else: the answer to a step of nine runs, eight saves under way.

    python benchmarks/saves.py [--call-s 0.2] [--rounds N] [--output FILE]

A worker as it is shipped, with default settings, on a journal in SQLite and an engine that computes nothing; every call
of its object store takes its time. The eight saves are sent first, by adapters of their own. Beside it stands the same
with no save at all, the two in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
from celery import Celery

from machine import load_average, machine_facts
from measures import rounded
from twinkle.core.adapter import AdapterConfig
from twinkle.core.clock import SystemClock
from twinkle.core.ids import request_id_of
from twinkle.core.lease import ProcessIdentity
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.scheduler.token_stream import TokenPublisher
from twinkle.storage.blobs import FolderStore
from twinkle.storage.disks import Disks
from twinkle.storage.journal.records import NewAdapter
from twinkle.storage.schema import upgrade
from twinkle.storage.stores import Stores
from twinkle.storage.tenants.sessions import NewSession
from twinkle.wire.training import ForwardBackwardBody, WireDatum, encode_forward_backward
from twinkle.workers.assembly import Surroundings, WorkerOptions, WorkerParts
from twinkle.workers.clerk import OneThread
from twinkle.workers.engines.null_engine import NullEngine, NullState
from twinkle.workers.report import OperationReporter
from twinkle.workers.sampling.sampling import CacheGroups

RESULTS = Path(__file__).parent / "results"
NUM_SAVES = 8
NUM_RUNS = 9
SESSION = NewSession(
    tags=[], user_metadata=None, project_id=None, display_name="", sdk_version="", idempotency_key=None
)
LIMIT_S = 60.0
_NO_BROKER = "redis://127.0.0.1:1"
_TOKENS = np.arange(64, dtype=np.int64)


class SlowStore(FolderStore):
    """An object store that is far away."""

    def __init__(self, folder: Path, call_s: float) -> None:
        super().__init__(folder)
        self._call_s = call_s

    def put(self, key: str, data: bytes) -> None:
        time.sleep(self._call_s)
        super().put(key, data)

    def get(self, key: str) -> bytes:
        time.sleep(self._call_s)
        return super().get(key)


class Ends(CompletionPublisher):
    """When each future was said to be done."""

    def __init__(self) -> None:
        super().__init__(_NO_BROKER)
        self.at: dict[str, float] = {}

    def publish(self, request_ids: Sequence[str]) -> None:
        self.at |= dict.fromkeys(request_ids, time.perf_counter())


class World:
    """A journal with adapters that exist, and the worker that serves them."""

    def __init__(self, folder: Path, call_s: float) -> None:
        clock = SystemClock()
        stores = Stores.at(f"sqlite:///{folder}/journal.db", clock)
        upgrade(stores.database.url)
        settings = Settings(engine="null")
        self.clock, self.mesh, self.ends = clock, settings.mesh, Ends()
        self.journal = stores.journal
        key = stores.tenants.key(stores.tenants.create_key("tenant", "key"))
        assert key is not None
        self.tenant = key.tenant
        self.session = stores.sessions.open(key.tenant, SESSION)
        self.engine = NullEngine(base_model="null", max_rank=32)
        around = Surroundings(
            stores=stores,
            journal=self.journal,
            blobs=SlowStore(folder / "objects", call_s),
            clock=clock,
            identity=ProcessIdentity.current(),
            capabilities=self.engine.capabilities,
            publisher=self.ends,
            token_publisher=TokenPublisher(_NO_BROKER),
            reporter=OperationReporter(Celery(), "benchmark", name_of_tenant=str),
            cache_groups=CacheGroups({}, str),
            threads=ThreadPoolExecutor(settings.transfer_threads),
            clerk=OneThread("clerk"),
            disks=Disks([], clock, low_bytes=0, critical_bytes=0),
            teller=ThreadPoolExecutor(1),
        )
        parts = WorkerParts[NullState](self.engine, around, WorkerOptions.of(settings))
        self.worker, self.transfers = parts.worker, parts.transfers
        assert parts.keeper.try_acquire() is not None

    def adapters(self, label: str, count: int) -> list[str]:
        """New adapters that are on the device."""
        names = [f"{self.session}:{label}:{number}" for number in range(count)]
        config = AdapterConfig(base_model="null", rank=8, seed=1)
        for name in names:
            adapter = NewAdapter(
                id=name,
                tenant=self.tenant,
                session=self.session,
                mesh=self.mesh,
                config=config,
                optimizer={"type": "adamw"},
                user_metadata=None,
                created_at=self.clock.now(),
            )
            first = self._submission(name, 0, OperationKind.CREATE_MODEL, config.model_dump_json().encode())
            self.journal.open_lane(adapter, first)
        self.work(names, last=0)
        return names

    def save(self, adapter: str) -> None:
        """Ask for a checkpoint."""
        body = json.dumps({"model_id": adapter, "seq_id": 1, "path": "x"}).encode()
        self.journal.append([self._submission(adapter, 1, OperationKind.SAVE_WEIGHTS, body)])

    def step(self, adapter: str) -> None:
        """Ask for a pass and a step."""
        batch = ForwardBackwardBody(
            adapter, 1, False, "cross_entropy", {}, (WireDatum(_TOKENS, {"target_tokens": _TOKENS}),)
        )
        step = json.dumps({"model_id": adapter, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}).encode()
        self.journal.append(
            [
                self._submission(adapter, 1, OperationKind.FORWARD_BACKWARD, encode_forward_backward(batch)),
                self._submission(adapter, 2, OperationKind.OPTIM_STEP, step),
            ]
        )

    def work(self, adapters: Sequence[str], *, last: int) -> list[float]:
        """Work until the operations with this number are done; when each of them was said to be."""
        awaited = [request_id_of(adapter, last) for adapter in adapters]
        ends_at = time.perf_counter() + LIMIT_S
        while not all(one in self.ends.at for one in awaited):
            if time.perf_counter() > ends_at:
                raise RuntimeError(f"not done within {LIMIT_S} s")
            self.worker.drain(budget_s=1.0)
        return [self.ends.at[one] for one in awaited]

    def _submission(self, adapter: str, seq: int, kind: OperationKind, body: bytes) -> Submission:
        return Submission(
            tenant=self.tenant,
            lane=adapter,
            seq=seq,
            kind=kind,
            digest=sha256(body).hexdigest(),
            payload=Payload(inline=body),
            num_tokens=len(_TOKENS) if kind is OperationKind.FORWARD_BACKWARD else 0,
        )


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call-s", type=float, default=0.2, help="what each call of the object store takes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "saves.json")
    arguments = parser.parse_args()
    machine, load_before = machine_facts(("celery",)), load_average()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), arguments.call_s)
        for number in range(arguments.rounds):
            alone = measure(world, f"alone{number}", num_saves=0)
            beside = measure(world, f"beside{number}", num_saves=NUM_SAVES)
            rounds.append({"alone_s": alone[0], "beside_saves_s": beside[0], "saves_s": beside[1]})
        world.transfers.close()
    result = {
        "benchmark": "saves",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {"saves": NUM_SAVES, "runs": NUM_RUNS, "call_s": arguments.call_s, "rounds": arguments.rounds},
        "median": {name: rounded(statistics.median(one[name] for one in rounds)) for name in rounds[0]},
        "worst": {name: rounded(max(one[name] for one in rounds)) for name in rounds[0]},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"median": result["median"], "worst": result["worst"]}))


def measure(world: World, label: str, *, num_saves: int) -> tuple[float, float]:
    """The seconds from the first request to the answer to the last of the runs' steps, and to the last save."""
    savers, runs = world.adapters(f"{label}save", num_saves), world.adapters(f"{label}run", NUM_RUNS)
    began = time.perf_counter()
    for adapter in savers:
        world.save(adapter)
    for adapter in runs:
        world.step(adapter)
    steps = world.work(runs, last=2)
    saves = world.work(savers, last=1)
    return max(steps) - began, max(saves, default=began) - began


if __name__ == "__main__":
    main()
