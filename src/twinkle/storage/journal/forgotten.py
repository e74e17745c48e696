"""What is remembered of operations whose rows are gone: enough to know a resend of one, and to say what became of it.

In an ordered lane its floor says it, ``lane.gone_seq``; requests that were named by a key are remembered by that. The
samples of a lane arrive in any order, and each of its clients counts for itself: of each the highest number that was
forgotten is remembered. Numbers too high to be a client's were drawn, and each is remembered by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256

from twinkle.core.errors import Expired
from twinkle.storage.database import Database, Transaction, placeholders

SEQS_PER_CLIENT = 1_000_000_000
"""How many samples a client of a sampling session can number before it comes to the next one's numbers."""

_FIRST_DRAWN = 10**6 * SEQS_PER_CLIENT
_REQUEST_ID = re.compile(r"(.+):req:([0-9]{1,18}|[0-8][0-9]{18})", re.ASCII | re.DOTALL)
_BEHIND = "(SELECT 1 FROM forgotten f WHERE f.lane = {lane} AND f.number = ? AND f.last_seq >= ?)"


def why_forgotten(request_id: str) -> str:
    """What whoever asks for one of them is told, or sends it again."""
    return (
        f"operation {request_id} ended so long ago that it was forgotten (TWINKLE_OPERATION_RETENTION_S); it was not"
        " done again. A new request takes a new number, or key"
    )


def why_lane_is_gone(lane: str) -> str:
    """What whoever asks for a run, a data set or a sampling session is told that is forgotten."""
    return (
        f"{lane} ended so long ago that it was forgotten (TWINKLE_RUN_RETENTION_S), and nothing was done again; a new"
        " one takes a new number"
    )


def gone_lanes(transaction: Transaction, ids: Sequence[str]) -> dict[str, str]:
    """The tenants of those among these lanes that are forgotten."""
    rows = transaction.execute(f"SELECT id, tenant FROM gone_lane WHERE id IN ({placeholders(ids)})", ids).fetchall()
    return {row.id: row.tenant for row in rows}


def refuse_gone(transaction: Transaction, lane: str) -> None:
    """Raise ``Expired`` for a lane that is forgotten: no other is made under its id."""
    if gone_lanes(transaction, [lane]):
        raise Expired(why_lane_is_gone(lane))


def number_of_sample(seq: int) -> int:
    """Under what a sample is remembered: its client's number, or its own where it was drawn."""
    return seq if seq >= _FIRST_DRAWN else seq // SEQS_PER_CLIENT


def number_of_key(request_key: str) -> int:
    """Under what a request is remembered that its client has named: 63 bits."""
    return int.from_bytes(sha256(request_key.encode()).digest()[:8]) >> 1


def is_forgotten(transaction: Transaction, lane: str, seq: int, *, ordered: bool) -> bool:
    """Whether an operation at or below the floor of a locked lane is forgotten, or none that may come any more."""
    if ordered:
        return True
    found = transaction.execute(
        f"SELECT 1 AS one WHERE EXISTS {_BEHIND.format(lane='?')}", (lane, number_of_sample(seq), seq)
    )
    return found.fetchone() is not None


def seq_of_key(transaction: Transaction, lane: str, request_key: str) -> int | None:
    """The number of the forgotten operation of a lane that had this key."""
    row = transaction.execute(
        "SELECT last_seq FROM forgotten WHERE lane = ? AND number = ?", (lane, number_of_key(request_key))
    ).fetchone()
    return None if row is None else int(row.last_seq)


def has_sample(lane: str) -> str:
    """A condition: a sample of this number was accepted in a lane, the column named, whether its row is kept or not.

    Its parameters are those that :func:`sample_parameters` gives.
    """
    has_row = f"EXISTS (SELECT 1 FROM operation o WHERE o.lane = {lane} AND o.seq = ?)"
    return f"({has_row} OR EXISTS {_BEHIND.format(lane=lane)})"


def sample_parameters(seq: int) -> tuple[int, int, int]:
    """Of that condition."""
    return seq, number_of_sample(seq), seq


def owners_of_forgotten(database: Database, request_ids: Sequence[str]) -> dict[str, str]:
    """The tenants of those among these futures, none of which has a row, that were forgotten."""
    parsed = {found[0]: (found[1], int(found[2])) for found in map(_REQUEST_ID.fullmatch, request_ids) if found}
    if not parsed:
        return {}
    names = sorted({lane for lane, _ in parsed.values()})
    rows = database.read(
        f"SELECT id, tenant, ordered, gone_seq FROM lane WHERE gone_seq >= 0 AND id IN ({placeholders(names)})", names
    )
    lanes = {row.id: row for row in rows}
    gone = {
        row.id: row.tenant
        for row in database.read(f"SELECT id, tenant FROM gone_lane WHERE id IN ({placeholders(names)})", names)
    }
    below = {one: at for one, at in parsed.items() if at[0] in lanes and at[1] <= lanes[at[0]].gone_seq}
    found = {one: lanes[lane].tenant for one, (lane, _) in below.items() if lanes[lane].ordered}
    samples = {one: at for one, at in below.items() if not lanes[at[0]].ordered}
    remembered = _last_seqs(database, samples.values())
    for one, (lane, seq) in samples.items():
        if remembered.get((lane, number_of_sample(seq)), -1) >= seq:
            found[one] = lanes[lane].tenant
    return found | {one: gone[lane] for one, (lane, _) in parsed.items() if lane in gone}


def _last_seqs(database: Database, samples: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
    places = sorted({(lane, number_of_sample(seq)) for lane, seq in samples})
    if not places:
        return {}
    marks = ", ".join(["(?, CAST(? AS BIGINT))"] * len(places))
    rows = database.read(
        f"WITH wanted(lane, number) AS (VALUES {marks}) SELECT f.lane, f.number, f.last_seq FROM wanted w"
        " JOIN forgotten f ON f.lane = w.lane AND f.number = w.number",
        [value for place in places for value in place],
    )
    return {(row.lane, row.number): row.last_seq for row in rows}
