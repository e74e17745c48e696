"""Two workers for one mesh on PostgreSQL: one works, one stands by, and faults make them change places."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.crashes import Crashes
from harness.deployment import Deployment
from harness.history import History, Verdict, judge, read_rows
from harness.polling import busyness, wait_for, wait_until
from harness.recovery import finished_again_s, now, running_again_s, tell
from harness.servers import PostgresServer, RedisServer, postgres_folder
from harness.tenant import Tenant, burst

WORKER = ("worker", "--mesh", "main", "--model", "null", "--engine", "null")
LEASE_S = 4.0
GOES_ON_WITHIN_S = 30.0
AWAY_S = 3.0


class Pair:
    """The deployment, its servers and its crash points."""

    def __init__(self, folder: Path, postgres: PostgresServer, broker: RedisServer) -> None:
        self.postgres = postgres
        self.crashes = Crashes(folder / "crashes")
        self.objects = folder / "objects"
        settings = {
            "TWINKLE_DATABASE_URL": postgres.url,
            "TWINKLE_REDIS_URL": broker.url,
            "TWINKLE_OBJECT_STORE": str(self.objects),
            "TWINKLE_LEASE_S": str(LEASE_S),
            "TWINKLE_SNAPSHOT_EVERY_OPS": "7",
            "TWINKLE_INLINE_PAYLOAD_BYTES": "1024",
        }
        self.deployment = Deployment(folder, settings | self.crashes.variables)

    def start(self) -> None:
        self.deployment.start("first", *WORKER)
        self.deployment.start("second", *WORKER)
        self.deployment.start("housekeeping", "housekeeping")
        self.deployment.start_server()
        self.deployment.await_ready()
        self.key = self.deployment.create_key("pair")

    def work_through(self, fault: Callable[[], None]) -> Verdict:
        history = History()
        tenant = Tenant(self.deployment.url, self.key, history)
        with ThreadPoolExecutor(1) as breaker:
            broken = breaker.submit(fault)
            while True:
                burst(tenant)
                if broken.done():
                    break
        broken.result()
        tenant.close()
        lanes = {event.lane for event in history.events}
        rows = [row for row in read_rows(self.deployment.query) if row.lane in lanes]
        return judge(history.events, rows, lambda key: (self.objects / key).read_bytes())

    def work_a_little(self) -> None:
        finished_again_s(self.deployment.query, now(), count=5)

    def holder(self) -> tuple[int, int]:
        """The epoch of the mesh, and the process that holds it."""
        epoch, identity = wait_for(self.deployment.holder, what="a lease holder")
        return epoch, identity.pid


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    broker = RedisServer(folder)
    broker.start()
    with postgres_folder() as data:
        postgres = PostgresServer(data)
        pair = Pair(folder, postgres, broker)
        try:
            pair.start()
            yield pair
        except BaseException:
            print(pair.deployment.logs())
            raise
        finally:
            pair.deployment.stop()
            broker.kill()
            postgres.close()


def test_of_two_workers_for_one_mesh_one_works(pair: Pair) -> None:
    epoch, _ = pair.holder()
    begun_at = now()

    verdict = pair.work_through(pair.work_a_little)

    assert verdict.violations == verdict.failed == []
    assert pair.deployment.query(f"SELECT DISTINCT claim_epoch FROM operation WHERE accepted_at >= {begun_at}") == [
        (epoch,)
    ]


def test_a_worker_frozen_past_its_lease_computes_and_cannot_commit(pair: Pair) -> None:
    """It freezes between executing and committing, another takes over, then it wakes and tries to commit."""
    frozen: list[tuple[int, int]] = []

    def freeze() -> None:
        pair.crashes.arm("worker.executed", count=6, signal="STOP")
        pair.crashes.wait("worker.executed")
        ((epoch, owner),) = pair.deployment.query("SELECT epoch, owner FROM mesh")
        frozen.append((epoch, int(owner.split("|")[2])))
        wait_until(lambda: pair.holder()[0] > epoch, what="a successor", deadline_s=3 * LEASE_S * busyness())
        pair.work_a_little()
        os.kill(frozen[0][1], signal.SIGCONT)
        name = pair.deployment.name_of(frozen[0][1])
        wait_until(lambda: "worker.fenced" in pair.deployment.log(name), what="the late commit is refused")

    verdict = pair.work_through(freeze)

    epoch = frozen[0][0]
    assert verdict.violations == verdict.failed == []
    assert pair.deployment.query(
        f"SELECT COUNT(*) FROM operation WHERE claim_epoch = {epoch} AND state = 'running'"
    ) == [(0,)]
    assert pair.holder()[0] > epoch


def test_the_one_that_stands_by_takes_over_from_a_killed_process_at_once(pair: Pair) -> None:
    seconds: list[float] = []

    def kill() -> None:
        for _ in range(3):
            pair.crashes.arm("worker.executed", count=6)
            seconds.append(running_again_s(pair.deployment.query, pair.crashes.wait("worker.executed")))

    verdict = pair.work_through(kill)

    tell("the holder of a mesh killed, until its operation runs in the process that stood by", seconds)
    assert verdict.violations == verdict.failed == []
    assert max(seconds) < GOES_ON_WITHIN_S * busyness()


def test_a_database_that_crashes_and_comes_back_pauses_everything_and_loses_nothing(pair: Pair) -> None:
    seconds: list[float] = []

    def crash() -> None:
        pair.work_a_little()
        pair.postgres.stop_at_once()
        threading.Event().wait(AWAY_S)
        pair.postgres.start()
        seconds.append(finished_again_s(pair.deployment.query, now(), count=10))

    verdict = pair.work_through(crash)

    tell("PostgreSQL crashed for three seconds, from its return until ten more operations have ended", seconds)
    assert verdict.violations == verdict.failed == []
    assert seconds[0] < GOES_ON_WITHIN_S * busyness()


def test_workers_that_start_while_the_database_is_away_work_once_it_is_back(pair: Pair) -> None:
    """A child whose start failed must not stay behind as one that never works."""

    def crash() -> None:
        pair.work_a_little()
        # The holder, and the other as soon as it has taken over.
        pair.crashes.arm("lease.acquired")
        os.kill(pair.holder()[1], signal.SIGKILL)
        pair.crashes.wait("lease.acquired")
        pair.postgres.stop_at_once()
        for name in ("first", "second"):
            _await_log(pair, name)
        pair.postgres.start()
        finished_again_s(pair.deployment.query, now(), count=10)

    verdict = pair.work_through(crash)

    assert verdict.violations == verdict.failed == []


def _await_log(pair: Pair, name: str) -> None:
    wait_until(
        lambda: "worker.waits_for_database" in pair.deployment.log(name),
        what=f"the child of {name} meets the absent database",
        deadline_s=60,
    )
