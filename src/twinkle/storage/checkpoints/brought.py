"""Checkpoints that were brought in from folders: copies, which stay what they are whatever becomes of the folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from twinkle.core.adapter import AdapterConfig, Checkpoint, CheckpointKind, StoredFile
from twinkle.core.clock import Clock
from twinkle.storage.adapters.named import next_id
from twinkle.storage.checkpoints.checkpoints import Checkpoints
from twinkle.storage.checkpoints.contents import publish_checkpoint
from twinkle.storage.database import Database, Transaction
from twinkle.storage.journal.forgotten import has_sample, sample_parameters
from twinkle.storage.journal.records import insert_lane
from twinkle.storage.tenants.audit import insert_entry
from twinkle.storage.upkeep.waste import doom

_FOUND = (
    "SELECT path FROM checkpoint WHERE tenant = ? AND copied_from = ? AND (expires_at IS NULL OR expires_at > ?)"
    " LIMIT 1"
)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a checkpoint comes from: a folder, with the SHA-256 of what it held, for one tenant and base model."""

    tenant: str
    base_model: str
    folder: str
    digest: str

    @property
    def written(self) -> str:
        """As it is kept."""
        return f"{self.folder}#{self.base_model}#{self.digest}"


@dataclass(frozen=True, kw_only=True)
class NewBrought:
    """Weights about to be kept as the one checkpoint of a run of its own, which cannot be trained."""

    origin: Origin
    session: str
    mesh: str
    config: AdapterConfig
    name: str
    files: Mapping[str, StoredFile] = field(default_factory=dict)


class BroughtCheckpoints:
    """Keeps and finds them."""

    def __init__(self, database: Database, checkpoints: Checkpoints, clock: Clock) -> None:
        self._database = database
        self._checkpoints = checkpoints
        self._clock = clock

    def find(self, origin: Origin) -> Checkpoint | None:
        """What was made of just this content of a folder, if it is still there."""
        rows = self._database.read(
            _FOUND,
            (origin.tenant, origin.written, self._clock.now()),
        )
        return self._checkpoints.find(rows[0].path, tenant=origin.tenant) if rows else None

    def sampled_before(self, session: str, *, folder: str, base_model: str, seq: int) -> str | None:
        """The path of what was made of a folder and from which a sample of this number was accepted in a session."""
        prefix = f"{folder}#{base_model}#"
        rows = self._database.read(
            "SELECT s.checkpoint FROM sampling_session s JOIN checkpoint c ON c.path = s.checkpoint"
            f" WHERE s.session = ? AND SUBSTR(c.copied_from, 1, ?) = ? AND {has_sample('s.id')} LIMIT 1",
            (session, len(prefix), prefix, *sample_parameters(seq)),
        )
        return str(rows[0].checkpoint) if rows else None

    def bring(self, new: NewBrought) -> Checkpoint:
        """Keep it, unless somebody was quicker: then the files are given up, and the answer is what there is."""
        origin, now = new.origin, self._clock.now()
        with self._database.transaction() as transaction:
            transaction.execute("SELECT id FROM session WHERE id = ? FOR UPDATE", (new.session,))
            there = transaction.execute(_FOUND, (origin.tenant, origin.written, now)).fetchone()
            if there is None:
                path = self._insert(transaction, new, now)
            else:
                path = str(there.path)
                doom(transaction, [file.key for file in new.files.values()], now=now)
        return self._checkpoints.find(path, tenant=origin.tenant)

    def _insert(self, transaction: Transaction, new: NewBrought, now: float) -> str:
        origin, run = new.origin, next_id(transaction, new.session)
        # Not ordered: no training operation is accepted into it.
        insert_lane(transaction, run, origin.tenant, new.mesh, ordered=False, requested_at=now)
        told = json.dumps({"folder": origin.folder})
        transaction.execute(
            "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, user_metadata, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (run, origin.tenant, new.session, new.mesh, new.config.model_dump_json(), "{}", told, now),
        )
        checkpoint = Checkpoint(
            path=f"tinker://{run}/{CheckpointKind.SAMPLER.segment}/{new.name}",
            tenant=origin.tenant,
            adapter=run,
            kind=CheckpointKind.SAMPLER,
            name=new.name,
            seq=0,
            config=new.config,
            files=dict(new.files),
            created_at=now,
            user_metadata={"folder": origin.folder},
        )
        publish_checkpoint(transaction, checkpoint, now=now)
        transaction.execute("UPDATE checkpoint SET copied_from = ? WHERE path = ?", (origin.written, checkpoint.path))
        details = {"tinker_path": checkpoint.path, "source": origin.folder}
        insert_entry(transaction, origin.tenant, "checkpoint_copy", details, now=now)
        return checkpoint.path
