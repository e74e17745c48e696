"""Tokens that the device has drawn and the host reads later, so that neither waits for the other.

A continuation goes on from its last token on the device. That it had ended is found out a pass later: the token drawn
meanwhile is dropped, which nobody can tell, since a token's bits depend on its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twinkle.infra.sending import send
from twinkle.sampler.drawing import DrawnRows, DrawnToken, start_draws
from twinkle.sampler.planning import Work
from twinkle.sampler.progress import Continuation, RequestProgress

Target = tuple[RequestProgress, Continuation]


@dataclass(frozen=True, eq=False)
class DrawnBatch:
    """One token for each of some continuations."""

    targets: Sequence[Target]
    drawn: DrawnRows

    @classmethod
    def start(cls, targets: Sequence[Target], logits_NV: torch.Tensor) -> DrawnBatch:
        """Lets the device draw from the row of each target."""
        draws = [progress.next_draw(continuation) for progress, continuation in targets]
        return cls(targets, start_draws(logits_NV, draws))

    def hand_out(self) -> None:
        """Lets the continuations that still run go on from these tokens before they are read."""
        for row, (progress, continuation) in enumerate(self.targets):
            if progress.running.get(continuation.sample) is continuation:
                continuation.unread = (self.drawn, row)

    def read(
        self, active: Iterable[RequestProgress]
    ) -> Iterator[tuple[RequestProgress, Continuation, DrawnToken | None]]:
        """Each continuation that still runs in ``active``, and its token; none where its logits were not finite."""
        known = set(map(id, active))
        for (progress, continuation), token in zip(self.targets, self.drawn.read(), strict=True):
            continuation.unread = None
            if id(progress) in known and progress.running.get(continuation.sample) is continuation:
                yield progress, continuation, token


def token_ids_of(works: Sequence[Work], device: torch.device) -> torch.Tensor:
    """The tokens of a pass [T], those that only the device knows among them."""
    token_ids_T = send([token for work in works for token in work.token_ids], torch.int64, device)
    places: dict[DrawnRows, list[tuple[int, int]]] = {}
    start = 0
    for work in works:
        if work.continuation is not None and work.continuation.unread is not None:
            drawn, row = work.continuation.unread
            places.setdefault(drawn, []).append((start, row))
        start += work.piece.num_tokens
    for drawn, pairs in places.items():
        place_N, row_N = send(np.array(pairs), torch.int64, device).unbind(-1)
        token_ids_T.index_copy_(0, place_N, drawn.tokens_N.index_select(0, row_N))
    return token_ids_T
