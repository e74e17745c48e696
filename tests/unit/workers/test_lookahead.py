"""What of a look ahead is begun: only what stands right behind what is in hand."""

from __future__ import annotations

from twinkle.core.operation import Claim, OperationKind, Payload
from twinkle.storage.journal.turns import Followed
from twinkle.workers.lookahead import in_line


def _claim(lane: str, seq: int) -> Claim:
    return Claim(
        request_id=f"{lane}:req:{seq}",
        tenant="t",
        lane=lane,
        seq=seq,
        kind=OperationKind.FORWARD_BACKWARD,
        payload=Payload(inline=b""),
        attempt=1,
        suspicions=0,
        num_tokens=1,
        accepted_at=0.0,
        rejection=None,
        failed_window_seq=None,
        num_sequences=1,
    )


def test_behind_one_that_ended_while_it_was_being_claimed_nothing_is_begun() -> None:
    followed = [Followed(lane="a", tenant="t", last_seq=4, room=3, num_tokens=1)]
    claims = [_claim("a", 5), _claim("b", 9), _claim("a", 7)]

    fit, unfit = in_line(claims, followed)

    assert fit == claims[:2]
    assert unfit == claims[2:]
