"""Journals of any size, and meshes whose engine is only simulated: it takes its time and computes nothing.

The journal, the scheduler, the leases and the broker are the service's own.
"""

from __future__ import annotations

import random
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import psycopg

from twinkle.cli.embedded.broker import answers, prepare_broker
from twinkle.core.clock import SystemClock
from twinkle.core.ids import request_id_of
from twinkle.core.lease import Lease, ProcessIdentity
from twinkle.core.operation import Claim, OperationKind, Outcome, Payload, Submission
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import choose_batch
from twinkle.storage.database import Database
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.meshes import Meshes
from twinkle.storage.journal.turns import Head
from twinkle.storage.schema import upgrade

PAYLOAD_BYTES = 256
ADAPTERS_OF_A_TENANT = 10
HEADS_OFFERED = 256
MAX_ADAPTERS = 64
MAX_TOKENS = 16_384
TOKENS_OF_A_PASS = 256
_FIRST = 1_000_000
_LEASE_S = 3600.0
_PAYLOAD = b"x" * PAYLOAD_BYTES
_BROKER_STARTS_WITHIN_S = 10.0


@dataclass(frozen=True, order=True, kw_only=True)
class Size:
    """How much there is: finished operations in the journal, adapters, meshes they are spread over."""

    rows: int
    adapters: int
    meshes: int

    @property
    def tenants(self) -> int:
        """How many tenants the adapters belong to."""
        return -(-self.adapters // ADAPTERS_OF_A_TENANT)

    def lane(self, number: int) -> str:
        """The id of an adapter."""
        return str(_FIRST + number % self.adapters)

    def mesh_of(self, number: int) -> str:
        """The mesh of an adapter."""
        return mesh_name(number % self.adapters % self.meshes)

    def tenant_of(self, number: int) -> str:
        """Whose an adapter is."""
        return str(_FIRST + number % self.adapters // ADAPTERS_OF_A_TENANT)

    def num_rows_of(self, number: int) -> int:
        """How many finished operations an adapter has."""
        whole, rest = divmod(self.rows, self.adapters)
        return whole + (number % self.adapters < rest)


def mesh_name(number: int) -> str:
    """The name of a mesh."""
    return f"mesh{number}"


@contextmanager
def new_database(folder: Path, server_url: str | None) -> Iterator[str]:
    """The URL of an empty journal with the current schema; on a PostgreSQL server it is dropped afterwards."""
    name = f"twinkle_scale_{uuid.uuid4().hex[:12]}"
    if server_url is None:
        url = f"sqlite:///{folder / name}.db"
        upgrade(url)
        yield url
        return
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            before, _, options = server_url.partition("?")
            url = f"{before.rpartition('/')[0]}/{name}" + (f"?{options}" if options else "")
            upgrade(url)
            yield url
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def fill(database: Database, size: Size) -> None:
    """Insert tenants, adapters and finished operations, the operations as they would have come: adapters in turn."""
    finished_at = time.time() - 3600.0
    numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {count})"
    tenants = numbers.format(count=size.tenants)
    lanes = numbers.format(count=size.adapters)
    lane, owner = f"CAST({_FIRST} + i AS TEXT)", f"CAST({_FIRST} + i / {ADAPTERS_OF_A_TENANT} AS TEXT)"
    mesh = f"'mesh' || CAST(i - (i / {size.meshes}) * {size.meshes} AS TEXT)"
    num_rows = f"{size.rows // size.adapters} + CASE WHEN i < {size.rows % size.adapters} THEN 1 ELSE 0 END"
    with database.transaction() as transaction:
        for statement in (
            f"INSERT INTO tenant (id, name, weight, created_at) {tenants} SELECT {lane}, {lane}, 1, 0 FROM n",
            "INSERT INTO session (id, tenant, tags, sdk_version, created_at, heartbeat_at)"
            f" {tenants} SELECT {lane}, {lane}, '[]', '', 0, {finished_at} FROM n",
            f"INSERT INTO share (mesh, tenant) {lanes} SELECT DISTINCT {mesh}, {owner} FROM n",
            "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime)"
            f" {lanes} SELECT {lane}, {owner}, {mesh}, TRUE, {num_rows}, {num_rows} - 1, 0, 0 FROM n",
            "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, created_at)"
            f" {lanes} SELECT {lane}, {owner}, {owner}, {mesh}, '{{}}', '{{}}', 0 FROM n",
            "INSERT INTO snapshot (adapter, seq, blob, size_bytes, created_at)"
            f" {lanes} SELECT {lane}, 0, {lane}, 1, {finished_at} FROM n",
        ):
            transaction.execute(statement)
        seq = f"n.i / {size.adapters}"
        transaction.execute(
            "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts, claim_epoch,"
            " payload, payload_bytes, result, num_tokens, num_prompt_tokens, device_s, expired, not_before,"
            f" accepted_at, started_at, finished_at) {numbers.format(count=size.rows)}"
            f" SELECT l.id || ':req:' || CAST({seq} AS TEXT), l.tenant, l.id, l.mesh, {seq}, 'forward_backward',"
            f" 'digest', 'done', 1, 1, ?, {PAYLOAD_BYTES}, ?, {TOKENS_OF_A_PASS}, 0, 0.01, FALSE, 0,"
            f" {finished_at} + n.i * 0.001, {finished_at} + n.i * 0.001, {finished_at} + n.i * 0.001"
            f" FROM n JOIN lane l ON l.id = CAST({_FIRST} + n.i - ({seq}) * {size.adapters} AS TEXT)",
            (_PAYLOAD, _PAYLOAD),
        )
    if database.is_postgres:
        # As autovacuum would have done by then; nobody does it for SQLite, here or in the service.
        with database.transaction() as transaction:
            transaction.execute("ANALYZE")


def submission(size: Size, number: int, seq: int, kind: OperationKind) -> Submission:
    """An operation of adapter ``number``."""
    return Submission(
        tenant=size.tenant_of(number),
        lane=size.lane(number),
        seq=seq,
        kind=kind,
        digest=sha256(f"{number} {seq}".encode()).hexdigest(),
        payload=Payload(inline=_PAYLOAD),
        num_tokens=TOKENS_OF_A_PASS if kind is OperationKind.FORWARD_BACKWARD else 0,
    )


@dataclass(kw_only=True)
class SimulatedEngine:
    """Takes ``step_s`` for a device step, whatever is in it; dies in one of ``steps_per_crash`` (0: never)."""

    step_s: float = 0.0
    steps_per_crash: int = 0
    draws: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, claims: Sequence[Claim]) -> list[Outcome] | None:
        """The outcomes, or ``None`` where the process would be gone."""
        if self.step_s:
            time.sleep(self.step_s)
        if self.steps_per_crash and self.draws.randrange(self.steps_per_crash) == 0:
            return None
        return [
            Outcome(
                request_id=claim.request_id,
                lane=claim.lane,
                seq=claim.seq,
                kind=claim.kind,
                result=Payload(inline=_PAYLOAD),
                device_s=self.step_s / len(claims),
                num_tokens=claim.num_tokens,
            )
            for claim in claims
        ]


class SimulatedMesh:
    """A mesh's worker; when it dies, nothing is said and the next one takes the lease from a process known dead.

    ``cpu_s`` is what its claims and its commits have taken.
    """

    def __init__(self, database: Database, name: str, engine: SimulatedEngine) -> None:
        clock = SystemClock()
        self.journal = Journal(database, clock)
        self._meshes = Meshes(database, clock)
        self._name = name
        self._engine = engine
        self._previous_was_light = False
        self.num_crashes = 0
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.lease = self._take_lease()

    def drain(self) -> list[str]:
        """Claim, run and commit until nothing is left; the futures that ended."""
        ended: list[str] = []
        while claims := self._claim():
            self._previous_was_light = claims[0].kind is OperationKind.OPTIM_STEP
            outcomes = self._engine.run(claims)
            if outcomes is None:
                self.num_crashes += 1
                self._previous_was_light = False
                self.lease = self._take_lease()
                continue
            started = time.thread_time()
            self.journal.commit(self.lease, outcomes)
            self.cpu_s["commit"] += time.thread_time() - started
            ended += [outcome.request_id for outcome in outcomes]
        return ended

    def choose(self, heads: list[Head]) -> list[Head]:
        """The service's own choice of a batch, with its usual bounds."""
        return choose_batch(
            heads,
            max_adapters=MAX_ADAPTERS,
            max_tokens=MAX_TOKENS,
            min_tokens=0,
            previous_was_light=self._previous_was_light,
        )

    def _claim(self) -> list[Claim]:
        started = time.thread_time()
        claims = self.journal.claim(self.lease, with_virtual_time(self.choose), HEADS_OFFERED)
        self.cpu_s["claim"] += time.thread_time() - started
        return claims

    def _take_lease(self) -> Lease:
        # A process that had this pid before us: the kernel no longer knows it, so nobody waits for its lease.
        identity = replace(ProcessIdentity.current(), start_ticks=self.num_crashes + 1)
        lease = self._meshes.acquire(self._name, identity, lease_s=_LEASE_S)
        if lease is None:
            raise RuntimeError(f"somebody else holds {self._name}")
        return lease


@contextmanager
def broker(folder: Path) -> Iterator[str]:
    """A broker of one's own, as ``twinkle serve`` starts it; its URL."""
    prepared = prepare_broker(folder)
    process = subprocess.Popen(prepared.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends_at = time.monotonic() + _BROKER_STARTS_WITHIN_S
        while not answers(prepared.url):
            if time.monotonic() > ends_at:
                raise RuntimeError("the broker did not start")
            time.sleep(0.05)
        yield prepared.url
    finally:
        process.kill()
        process.wait()


def request_id(size: Size, number: int, seq: int) -> str:
    """The future of an operation."""
    return request_id_of(size.lane(number), seq)
