"""Operations that take their state from elsewhere, and how an adapter goes on with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from pydantic import BaseModel

from twinkle.core.adapter import Grant
from twinkle.core.operation import Claim
from twinkle.storage.journal.records import Records
from twinkle.workers.adapters.residents import Residents
from twinkle.workers.adapters.snapshots import Snapshots
from twinkle.workers.engine import Engine, State
from twinkle.workers.steps import Steps, Transfers


class LoadRequest(BaseModel, frozen=True):
    """What a load needs to know, whether it makes an adapter or fills one, and who allowed it if that was a token.

    ``content`` is what another run's path meant at its acceptance; nothing when that was nothing to this tenant.
    """

    path: str
    optimizer: bool = False
    content: str | None = None
    grant: Grant | None = None


@dataclass(frozen=True, kw_only=True)
class Beginnings(Generic[State]):
    """States that no operation of the adapter has made."""

    engine: Engine[State]
    residents: Residents[State]
    snapshots: Snapshots
    transfers: Transfers

    def start_from(self, claim: Claim, state: State, records: Records) -> Steps[None]:
        """Go on with a state from elsewhere, which is recorded with the outcome: what it came from may change or go."""
        yield from self.transfers.room()
        snapshot = yield from self.snapshots.store_start(claim.lane, claim.seq, self.engine.snapshot(state))
        records.snapshots.append(snapshot)
        self.residents.put(claim.lane, claim.seq, state, snapshot_seq=claim.seq)
