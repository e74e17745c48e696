"""What is told of a training run, in whichever dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.adapter import Checkpoint, CheckpointKind
from twinkle.server.state import AccountParts, ArtifactParts
from twinkle.storage.adapters.adapters import Adapter


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run, its owner's name, and what it has saved last of each kind."""

    run: Adapter
    owner: str
    last_request_at: float
    training: Checkpoint | None
    sampler: Checkpoint | None


def views_of(accounts: AccountParts, artifacts: ArtifactParts, tenant: str, runs: Sequence[Adapter]) -> list[RunView]:
    """Of some of a tenant's runs. Blocks."""
    owner = accounts.tenants.name_of(tenant)
    ids = [run.id for run in runs]
    requested_at = artifacts.adapters.last_requests_at(ids)
    latest = artifacts.checkpoints.latest(ids)
    return [
        RunView(
            run=run,
            owner=owner,
            last_request_at=requested_at.get(run.id, run.created_at),
            training=latest.get((run.id, CheckpointKind.TRAINING)),
            sampler=latest.get((run.id, CheckpointKind.SAMPLER)),
        )
        for run in runs
    ]
