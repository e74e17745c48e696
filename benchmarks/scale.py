"""Whether an operation costs the same in a small service and in a large one: journal rows, adapters, meshes.

    python benchmarks/scale.py [--short | --full] [--database URL] [--output FILE]

An engine that only takes its time stands in for the device; journal, scheduler, leases and broker are the service's
own, in one process and without HTTP. *Alone*: one operation at a time, so a transaction holds one everywhere and only
what lies around it differs. All sizes of a series take turns, so that a busy machine is busy for all. *Loaded*: every
adapter has work waiting, nudges go through the broker, workers die now and then. With ``--database`` (PostgreSQL, any
database of a server in which databases may be created) the CPU is that of this process, the server's is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import redis

from machine import load_average, machine_facts
from measures import percentile, rounded
from scale_world import (
    HEADS_OFFERED,
    MAX_ADAPTERS,
    PAYLOAD_BYTES,
    SimulatedEngine,
    SimulatedMesh,
    Size,
    broker,
    fill,
    mesh_name,
    new_database,
    request_id,
    submission,
)
from together import group_commits, wake_ups
from twinkle.core.clock import SystemClock
from twinkle.core.errors import TwinkleError
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, OperationKind, Submission
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import CompletionPublisher
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.storage.adapters.snapshots import SnapshotStore
from twinkle.storage.database import Database
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.meshes import Meshes
from twinkle.storage.upkeep.upkeep import Upkeep
from twinkle.tasks.app import make_app, mesh_queue
from twinkle.tasks.nudge import Nudger, bell_key

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("redis", "celery", "psycopg", "sqlalchemy")
PARTS = ("append", "claim", "commit", "status", "board", "sweep", "expire")
ROUNDS = 5
DAY_S = 86_400.0
_IDLE_S = 1.0

Times = dict[str, list[tuple[float, float]]]
T = TypeVar("T")


def series_of(*, short: bool, full: bool) -> Mapping[str, Sequence[Size]]:
    """Sizes that differ in one thing only, the smallest first."""
    most_rows, most_adapters, most_meshes = (20_000, 1_000, 8) if short else (200_000, 2_000, 64)
    if full:
        most_rows, most_adapters = 1_000_000, 10_000
    middle = most_rows // 10
    return {
        "rows": [Size(rows=rows, adapters=100, meshes=4) for rows in (100, middle, most_rows)],
        "adapters": [Size(rows=middle, adapters=count, meshes=1) for count in (1, 100, most_adapters)],
        "meshes": [Size(rows=middle, adapters=most_adapters, meshes=count) for count in (1, 8, most_meshes)][
            : 2 if short else 3
        ],
        "all": [
            Size(rows=100, adapters=1, meshes=1),
            Size(rows=most_rows, adapters=most_adapters, meshes=most_meshes),
        ],
    }


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="small sizes, less than half a minute")
    parser.add_argument("--full", action="store_true", help="a million rows, ten thousand adapters")
    parser.add_argument("--database", help="a PostgreSQL server's URL; without it SQLite")
    parser.add_argument("--step-s", type=float, default=0.0, help="what a simulated device step takes")
    parser.add_argument("--steps-per-crash", type=int, default=50, help="how often a worker dies; 0 is never")
    parser.add_argument("--output", type=Path, help="results/scale.json, or scale_postgresql.json with --database")
    arguments = parser.parse_args()
    output = arguments.output or RESULTS / ("scale_postgresql.json" if arguments.database else "scale.json")
    num_operations = 30 if arguments.short else 100
    machine, load_before = machine_facts(PACKAGES), load_average()
    alone, loaded = [], []
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as home, broker(Path(home)) as redis_url:
        folder = Path(home)
        for name, sizes in series_of(short=arguments.short, full=arguments.full).items():
            started = time.monotonic()
            with ExitStack() as stack:
                databases = {
                    size: Database(stack.enter_context(new_database(folder, arguments.database))) for size in sizes
                }
                for size, database in databases.items():
                    fill(database, size)
                alone += [{"series": name, **row} for row in measure_alone(databases, num_operations)]
                for size, database in databases.items():
                    engine = SimulatedEngine(step_s=arguments.step_s, steps_per_crash=arguments.steps_per_crash)
                    loaded.append({"series": name, **measure_loaded(database, size, engine, redis_url)})
                    database.close()
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        with new_database(folder, arguments.database) as url:
            together = group_commits(url, redis_url, folder, short=arguments.short)
        with new_database(folder, arguments.database) as url:
            wakes = wake_ups(url, redis_url, short=arguments.short)
    result = {
        "benchmark": "scale",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {
            "database": "SQLite" if arguments.database is None else "PostgreSQL",
            "payload_bytes": PAYLOAD_BYTES,
            "operations_alone": ROUNDS * num_operations,
            "step_s": arguments.step_s,
            "steps_per_crash": arguments.steps_per_crash,
            "max_adapters": MAX_ADAPTERS,
        },
        "alone": alone,
        "loaded": loaded,
        "group_commit": together,
        "wake_ups": wakes,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {output}")


def measure_alone(databases: Mapping[Size, Database], num_operations: int) -> list[dict[str, object]]:
    """Each part's cost for one operation at a time, the sizes in turns; ratios to the first size."""
    sides = {size: _Alone(database, size) for size, database in databases.items()}
    for side in sides.values():
        side.run(max(num_operations // 10, 5))
        side.times.clear()
    for _ in range(ROUNDS):
        for side in sides.values():
            side.run(num_operations)
    rows = []
    smallest: dict[str, dict[str, float]] = {}
    for size, side in sides.items():
        costs = {part: _summary(side.times[part]) for part in PARTS}
        smallest = smallest or costs
        of_smallest = {
            part: {clock: rounded(value / smallest[part][clock]) for clock, value in cost.items()}
            for part, cost in costs.items()
        }
        rows.append({**asdict(size), "cost": costs, "of_smallest": of_smallest})
    return rows


class _Alone:
    """One journal, and its operations one by one, each of another adapter."""

    def __init__(self, database: Database, size: Size) -> None:
        clock = SystemClock()
        self._size = size
        self._journal = Journal(database, clock)
        self._board = Meshes(database, clock)
        self._upkeep = Upkeep(database, clock)
        self._snapshots = SnapshotStore(database, clock)
        self._meshes = [SimulatedMesh(database, mesh_name(number), SimulatedEngine()) for number in range(size.meshes)]
        self._turn = 0
        self._next_seq: dict[int, int] = {}
        self.times: Times = defaultdict(list)

    def run(self, num_operations: int) -> None:
        """Append, claim, commit and ask, so many times; a sweep of each kind after every tenth."""
        for count in range(num_operations):
            self._operation()
            if count % 10 == 0:
                self._timed("board", self._board.all)
                self._timed("sweep", self._sweep)
                self._timed("expire", self._expire)

    def _operation(self) -> None:
        # A stride that meets every adapter, and neighbours on different pages.
        number = self._turn * 7919 % self._size.adapters
        self._turn += 1
        seq = self._next_seq.setdefault(number, self._size.num_rows_of(number))
        self._next_seq[number] += 1
        mesh = self._meshes[number % self._size.meshes]
        new = submission(self._size, number, seq, OperationKind.FORWARD_BACKWARD)
        self._timed("append", lambda: self._journal.append([new]))
        claims = self._timed(
            "claim", lambda: self._journal.claim(mesh.lease, with_virtual_time(mesh.choose), HEADS_OFFERED)
        )
        outcomes = SimulatedEngine().run(claims)
        if outcomes is None or [outcome.request_id for outcome in outcomes] != [request_id(self._size, number, seq)]:
            raise RuntimeError(f"operation {seq} of adapter {number} was not the one that was claimed")
        self._timed("commit", lambda: self._journal.commit(mesh.lease, outcomes))
        self._timed("status", lambda: self._journal.statuses([outcomes[0].request_id]))

    def _sweep(self) -> None:
        """What housekeeping does every second and every five, with nothing due."""
        self._journal.ready_meshes()
        self._upkeep.close_gaps(older_than_s=600.0)
        self._upkeep.expire_overdue(deadline_s=DAY_S)

    def _expire(self) -> None:
        """What it does every minute, with nothing due."""
        self._upkeep.expire_results(older_than_s=DAY_S)
        self._upkeep.expire_checkpoints()
        self._snapshots.runs_to_prune(older_than_s=7 * DAY_S)

    def _timed(self, part: str, call: Callable[[], T]) -> T:
        wall, cpu = time.perf_counter(), time.thread_time()
        answer = call()
        self.times[part].append((time.perf_counter() - wall, time.thread_time() - cpu))
        return answer


def measure_loaded(database: Database, size: Size, engine: SimulatedEngine, redis_url: str) -> dict[str, object]:
    """A pass and a step of every adapter, all waiting at once, through nudges and by batches, with crashes."""
    settings = Settings.model_validate({"redis_url": redis_url})
    nudger, publisher = Nudger(make_app(settings), redis_url), CompletionPublisher(redis_url)
    nudger.start()
    journal = Journal(database, SystemClock())
    firsts = _next_numbers(database)
    meshes = {mesh_name(number): SimulatedMesh(database, mesh_name(number), engine) for number in range(size.meshes)}
    repeats = max(1, 200 // size.adapters)
    wanted = [
        submission(size, number, firsts[size.lane(number)] + 2 * repeat + step, kind)
        for repeat in range(repeats)
        for step, kind in enumerate((OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP))
        for number in range(size.adapters)
    ]
    started, cpu_started = time.perf_counter(), time.process_time()
    for start in range(0, len(wanted), MAX_ADAPTERS):
        for mesh in {answer.mesh for answer in _accepted(journal, wanted[start : start + MAX_ADAPTERS])}:
            nudger.ring(mesh)
    appended_cpu_s = time.process_time() - cpu_started
    ended: list[str] = []
    with redis.Redis.from_url(redis_url) as client:
        queues = {mesh_queue(name): name for name in meshes}
        while len(ended) < len(wanted):
            message = client.blpop(list(queues), timeout=_IDLE_S)
            # Nobody was nudged for a while: the sweep finds who has work.
            names = journal.ready_meshes() if message is None else [queues[message[0].decode()]]
            for name in names:
                client.delete(bell_key(name))
                done = meshes[name].drain()
                publisher.publish(done)
                ended += done
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        nudger.stop()
        client.flushall()
    if sorted(ended) != sorted(request_id_of(one.lane, one.seq) for one in wanted):
        raise RuntimeError(f"{len(ended)} operations ended, {len(wanted)} were submitted, each was to end once")
    return {
        **asdict(size),
        "tenants": size.tenants,
        "operations": len(wanted),
        "crashes": sum(mesh.num_crashes for mesh in meshes.values()),
        "ops_per_s": rounded(len(wanted) / wall_s),
        "cpu_ms_per_op": rounded(1000 * cpu_s / len(wanted)),
        "append_cpu_ms_per_op": rounded(1000 * appended_cpu_s / len(wanted)),
        **{
            f"{part}_cpu_ms_per_op": rounded(1000 * sum(mesh.cpu_s[part] for mesh in meshes.values()) / len(wanted))
            for part in ("claim", "commit")
        },
    }


def _next_numbers(database: Database) -> dict[str, int]:
    return dict(database.read("SELECT id, head_seq FROM lane"))


def _accepted(journal: Journal, submissions: list[Submission]) -> list[Accepted]:
    answers = journal.append(submissions)
    for answer in answers:
        if isinstance(answer, TwinkleError):
            raise answer
    return [answer for answer in answers if isinstance(answer, Accepted)]


def _summary(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians, and the mean: a write-ahead log is written back now and then, which only the mean has in it."""
    return {
        "wall_p50_ms": rounded(1000 * percentile([wall for wall, _ in times], 50)),
        "cpu_ms": rounded(1000 * statistics.fmean(cpu for _, cpu in times)),
        "cpu_p50_ms": rounded(1000 * percentile([cpu for _, cpu in times], 50)),
    }


if __name__ == "__main__":
    main()
