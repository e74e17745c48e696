"""What payloads in the journal come to after the end of their operations: counted once, and taken off when they go."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from harness.clock import HandClock
from harness.journal import Bench, done, failed, new_sampler, submission
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind
from twinkle.core.processors import PROCESSORS_MESH
from twinkle.scheduler.retention import Retention
from twinkle.storage.adapters.snapshots import Snapshot
from twinkle.storage.processors.processors import NewProcessor
from twinkle.storage.upkeep import kept_payloads

KEEP_NOTHING = Retention(keep_s=0.0, every_ops=1, max_snapshots=2)
RUNS, SAMPLERS, PROCESSORS = ("a", "b"), ("s", "z"), ("p", "q")

KEPT = (
    "SELECT l.id, COALESCE(SUM(o.payload_bytes), 0) FROM lane l LEFT JOIN operation o ON o.lane = l.id"
    " AND o.payload IS NOT NULL AND o.state IN ('done', 'failed') AND (o.kind IN ('forward', 'forward_backward',"
    " 'sample') OR o.kind = 'call' AND l.mesh = ?) GROUP BY l.id ORDER BY l.id"
)


class Life:
    """What comes and goes in a journal, in whatever order."""

    def __init__(self, bench: Bench, lease: Lease, clock: HandClock, draw: random.Random) -> None:
        self._bench = bench
        self._lease = lease
        self._processors_lease = bench.lease(mesh=PROCESSORS_MESH)
        self._clock = clock
        self._draw = draw
        self._next = dict.fromkeys((*RUNS, *SAMPLERS, *PROCESSORS), 1)
        bench.created(lease, *RUNS)
        for name in SAMPLERS:
            bench.journal.open_lane(new_sampler(name))
        for name in PROCESSORS:
            new = NewProcessor(
                id=name,
                tenant="t0",
                session="session-t0",
                processor_type="dataset",
                class_type="Dataset",
                created_at=0.0,
            )
            bench.journal.open_lane(new, submission(name, 0, OperationKind.CALL, body=self._body()))

    def _body(self) -> bytes:
        return self._draw.randbytes(self._draw.randint(1, 2000))

    def send(self) -> None:
        """Some operations, most of them small passes and samples."""
        lane = self._draw.choice((*RUNS, *SAMPLERS, *(one for one in PROCESSORS if one in self._next)))
        passes = (OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP, OperationKind.CALL)
        for _ in range(self._draw.randint(1, 5)):
            if lane in SAMPLERS:
                kind = OperationKind.SAMPLE
            else:
                kind = OperationKind.CALL if lane in PROCESSORS else self._draw.choice(passes)
            self._bench.append(submission(lane, self._next[lane], kind, body=self._body()))
            self._next[lane] += 1

    def work(self) -> None:
        """Some of what waits ends, well or not."""
        bench, draw = self._bench, self._draw
        for lease in (self._lease, self._processors_lease):
            for claim in bench.claim(lease, draw.randint(1, 4)):
                bench.journal.commit(lease, [draw.choice((done, failed))(claim)])
        for claim in bench.claim_samples(self._lease, draw.randint(1, 4)):
            bench.journal.commit(self._lease, [draw.choice((done, failed))(claim)])

    def prune(self) -> None:
        """A recovery point at a run's last operation, and what it makes superfluous goes."""
        run = self._draw.choice(RUNS)
        seq = self._bench.lane(run).head_seq - 1
        self._clock.move(1)
        self._bench.snapshots.add(
            Snapshot(adapter=run, seq=seq, blob=f"{run}-{seq}", size_bytes=7, created_at=self._clock.now())
        )
        self._bench.snapshots.prune(run, KEEP_NOTHING.choose)

    def expire(self) -> None:
        """Results of all that ended some while ago go."""
        self._clock.move(1)
        self._bench.upkeep.expire_results(older_than_s=self._draw.choice((0.0, 3.0)))

    def end(self) -> None:
        """A data set ends, if its calls have; once."""
        name = PROCESSORS[0]
        if name in self._next and self._bench.lane(name).head_seq > self._bench.lane(name).max_seq:
            self._bench.stores.processors.end(name, "t0")
            del self._next[name]

    def count(self) -> None:
        """As housekeeping does."""
        self._bench.stores.kept_payloads.count()


def _counted(bench: Bench) -> list[tuple[object, ...]]:
    return [tuple(row) for row in bench.rows("SELECT id, kept_bytes FROM lane ORDER BY id")]


def _kept(bench: Bench) -> list[tuple[object, ...]]:
    return [tuple(row) for row in bench.rows(KEPT, (PROCESSORS_MESH,))]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_and_goes_each_lanes_count_is_what_its_payloads_come_to(
    bench: Bench, lease: Lease, clock: HandClock, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_payloads, "_OPERATIONS_A_STEP", 3)
    draw = random.Random(seed)
    life = Life(bench, lease, clock, draw)
    deeds: list[Callable[[], None]] = [life.send, life.send, life.work, life.work, life.prune, life.expire, life.end]
    counts = []
    for _ in range(120):
        draw.choice([*deeds, life.count])()
        assert all(0 <= counted[1] <= kept[1] for counted, kept in zip(_counted(bench), _kept(bench), strict=True))
        if draw.random() < 0.2:
            life.count()
            assert _counted(bench) == _kept(bench)
            counts.append(dict(_counted(bench)))

    for lanes in (RUNS, SAMPLERS, PROCESSORS):
        assert any(count[lane] for count in counts for lane in lanes), lanes
    held = bench.stores.holdings.of("t0")
    snapshots = bench.rows("SELECT COALESCE(SUM(size_bytes), 0) FROM snapshot")[0][0]
    assert held.kept_bytes == sum(count for _, count in _counted(bench)) + snapshots
    assert bench.stores.holdings.of("t1").kept_bytes == 0


def test_lanes_are_looked_at_in_turns(bench: Bench, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_payloads, "_LANES_A_LOOK", 2)
    bench.created(lease, *"abc")
    bench.append(*(submission(run, 1, body=b"x" * 100) for run in "abc"))
    bench.run(lease)

    looks = [bench.stores.kept_payloads.count(max_looks=1) for _ in range(3)]

    assert looks == [2, 1, 0]
    assert _counted(bench) == [(run, 100) for run in "abc"]
    assert bench.stores.kept_payloads.count() == 0, "nothing has ended since"


def test_what_a_tenant_keeps_is_summed_from_an_index(bench: Bench, lease: Lease) -> None:
    with bench.database.transaction() as transaction:
        transaction.execute(
            "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime, kept_bytes)"
            " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)"
            " SELECT 'l' || CAST(i AS TEXT), 't1', '', TRUE, 0, -1, 0, 0, CASE WHEN i < 10 THEN i ELSE 0 END FROM n"
        )
    if bench.database.is_postgres:
        with bench.database.transaction() as transaction:
            transaction.execute("ANALYZE lane")
    asked = "SELECT COALESCE(SUM(kept_bytes), 0) AS kept FROM lane WHERE tenant = 't1' AND kept_bytes > 0"
    explain = "EXPLAIN" if bench.database.is_postgres else "EXPLAIN QUERY PLAN"
    plan = "\n".join(str(tuple(row)) for row in bench.rows(f"{explain} {asked}"))

    assert "lane_keeping" in plan
    assert bench.stores.holdings.of("t1").kept_bytes == 45
