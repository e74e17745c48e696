"""Heads as the journal offers them, without a journal."""

from __future__ import annotations

from twinkle.core.operation import OperationKind
from twinkle.storage.journal.turns import Head, Turn


def turn(
    tenant: str = "t",
    *,
    vtime: float = 0.0,
    mesh_vtime: float = 0.0,
    lane_vtime: float = 0.0,
    weight: float = 1.0,
    max_running: int = 0,
    num_running: int = 0,
    num_running_tokens: int = 0,
) -> Turn:
    return Turn(
        tenant=tenant,
        vtime=vtime,
        mesh_vtime=mesh_vtime,
        lane_vtime=lane_vtime,
        weight=weight,
        max_running=max_running,
        num_running=num_running,
        num_running_tokens=num_running_tokens,
    )


def head(
    lane: str,
    kind: OperationKind = OperationKind.FORWARD_BACKWARD,
    *,
    of: Turn | None = None,
    seq: int = 1,
    suspicions: int = 0,
    num_tokens: int = 10,
    nice: int = 0,
    vtime: float = 0.0,
    has_next: bool = False,
    num_sequences: int = 1,
    num_running_tokens: int = 0,
) -> Head:
    return Head(
        turn=of or turn(),
        lane=lane,
        seq=seq,
        kind=kind,
        suspicions=suspicions,
        num_tokens=num_tokens,
        nice=nice,
        vtime=vtime,
        has_next=has_next,
        num_sequences=num_sequences,
        num_running_tokens=num_running_tokens,
    )
