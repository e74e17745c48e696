"""Checkpoints that are pushed by themselves: by whom it was wanted, whereto, and which have had their turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle.core.clock import Clock
from twinkle.core.errors import LimitReached, NotFound
from twinkle.core.ids import new_id
from twinkle.storage.database import Database, Row

MAX_PUSHES = 1000
"""Of a tenant: one for all its runs, and one for each run that has its own."""
RUN, CHECKPOINT = "{run}", "{checkpoint}"
"""In a target: what is pushed, in the letters that names of repositories have."""
_EACH = 8
# Saves come with the clocks of several machines, and may be a while between their time and their row.
_LOOKED_BACK_S = 3600.0
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 64


@dataclass(frozen=True, kw_only=True)
class Push:
    """That each new checkpoint of a run, or of all of a tenant's, is exported; ``spec`` is what such a job is told."""

    id: str
    tenant: str
    run: str | None
    spec: Mapping[str, Any]
    """Its secrets are sealed; ``to`` may hold ``{run}`` and ``{checkpoint}``."""
    created_at: float
    last_job: str | None = None
    """The job that was submitted last."""


@dataclass(frozen=True, kw_only=True)
class DuePush:
    """A checkpoint whose turn it is."""

    push: Push
    path: str
    content: str
    run: str
    name: str

    @property
    def spec(self) -> dict[str, Any]:
        """What its export is told."""
        target = filled(str(self.push.spec["to"]), run=self.run, checkpoint=self.name)
        return {**self.push.spec, "checkpoint": self.path, "to": target}


def filled(target: str, *, run: str, checkpoint: str) -> str:
    """A target with the names of what is pushed in it; letters that no hub takes become '-'."""
    for place, name in ((RUN, run), (CHECKPOINT, checkpoint)):
        target = target.replace(place, _FOREIGN.sub("-", name)[-_LONGEST_NAME:].strip("-."))
    return target


class Pushes:
    """What is wanted, until it is taken back."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def want(self, tenant: str, run: str | None, spec: Mapping[str, Any]) -> Push:
        """Push what is saved from now on; this takes the place of what was wanted for the same run, or for all.

        Raises:
            NotFound: There is no such run, or it is another tenant's.
            LimitReached: The tenant wants very many already.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            # Two that come at once wait for each other here.
            transaction.execute("SELECT id FROM tenant WHERE id = ? FOR UPDATE", (tenant,))
            if run is not None:
                found = transaction.execute("SELECT tenant FROM adapter WHERE id = ?", (run,)).fetchone()
                if found is None or found.tenant != tenant:
                    raise NotFound(f"no training run {run!r}")
            row = transaction.execute(
                "SELECT COUNT(*) AS num FROM push WHERE tenant = ? AND run <> ?", (tenant, run or "")
            ).fetchone()
            assert row is not None, "a count is a row"
            if row.num >= MAX_PUSHES:
                raise LimitReached(f"checkpoints of {row.num} runs are pushed already, as many as may be; end others")
            transaction.execute(
                "INSERT INTO push (id, tenant, run, spec, created_at, since) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (tenant, run) DO UPDATE SET spec = excluded.spec, created_at = excluded.created_at,"
                " since = excluded.since",
                (f"push-{new_id()}", tenant, run or "", json.dumps(dict(spec)), now, now),
            )
            made = transaction.execute(f"{_SELECT} WHERE tenant = ? AND run = ?", (tenant, run or "")).fetchone()
            assert made is not None, "it was inserted"
            return _push_of(made)

    def all(self, tenant: str) -> list[Push]:
        """What a tenant wants, the newest first."""
        rows = self._database.read(f"{_SELECT} WHERE tenant = ? ORDER BY created_at DESC, id", (tenant,))
        return [_push_of(row) for row in rows]

    def end(self, push_id: str, tenant: str) -> Push:
        """Push no more by it; what was submitted goes on.

        Raises:
            NotFound: There is none, or it is another tenant's.
        """
        with self._database.transaction() as transaction:
            row = transaction.execute(f"{_SELECT} WHERE id = ? AND tenant = ?", (push_id, tenant)).fetchone()
            if row is None:
                raise NotFound(f"no push {push_id!r}")
            transaction.execute("DELETE FROM push WHERE id = ?", (push_id,))
            return _push_of(row)

    def due(self) -> list[DuePush]:
        """Checkpoints that have not had their turn, a few of each push, the oldest first.

        A run that has a push of its own is not pushed by its tenant's.
        """
        rows = self._database.read(
            "SELECT * FROM (SELECT p.id, p.tenant, p.run, p.spec, p.created_at, p.last_job, c.path, c.content,"
            " c.adapter, c.name, ROW_NUMBER() OVER (PARTITION BY p.id ORDER BY c.created_at, c.path) AS place"
            " FROM push p JOIN checkpoint c ON c.tenant = p.tenant AND c.created_at >= p.since"
            " WHERE c.listed AND c.kind IN ('training', 'sampler') AND (c.expires_at IS NULL OR c.expires_at > ?)"
            " AND (c.pushed IS NULL OR c.pushed <> c.content) AND (p.run = c.adapter OR (p.run = ''"
            " AND NOT EXISTS (SELECT 1 FROM push o WHERE o.tenant = c.tenant AND o.run = c.adapter)))) AS waiting"
            " WHERE place <= ? ORDER BY place, id",
            (self._clock.now(), _EACH),
        )
        return [
            DuePush(push=_push_of(row), path=row.path, content=row.content, run=row.adapter, name=row.name)
            for row in rows
        ]

    def note(self, due: DuePush, job: str | None) -> None:
        """A checkpoint has had its turn, by a job or in vain."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE checkpoint SET pushed = content WHERE path = ? AND content = ?", (due.path, due.content)
            )
            if job is not None:
                transaction.execute("UPDATE push SET last_job = ? WHERE id = ?", (job, due.push.id))

    def look_on(self) -> None:
        """All that was due has had its turn: what is long past need not be looked at again."""
        since = self._clock.now() - _LOOKED_BACK_S
        with self._database.transaction() as transaction:
            transaction.execute("UPDATE push SET since = ? WHERE since < ?", (since, since))


_SELECT = "SELECT id, tenant, run, spec, created_at, last_job FROM push"


def _push_of(row: Row) -> Push:
    return Push(
        id=row.id,
        tenant=row.tenant,
        run=row.run or None,
        spec=json.loads(row.spec),
        created_at=row.created_at,
        last_job=row.last_job,
    )
