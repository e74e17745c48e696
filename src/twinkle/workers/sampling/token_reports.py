"""What those who listen to a sample hear of it before it is done. Nobody else's sample is ever looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from twinkle.core.clock import Clock
from twinkle.scheduler.token_stream import Listener, TokenPublisher
from twinkle.workers.engine import Engine, State

_INTERVAL_S = 0.025
_FIRST_REPEAT_AT = 64


@dataclass
class _Told:
    """How far one sample was reported, and the length from which on it is reported from its start once more."""

    num_tokens: int = 0
    repeat_at: int = _FIRST_REPEAT_AT

    def next_start(self) -> int:
        """From where to report now.

        Whenever a sample has doubled, everything is said again: whoever missed something, or came late, catches up, and
        the sum of all reports stays below three times the sample.
        """
        if self.num_tokens < self.repeat_at:
            return self.num_tokens
        self.repeat_at = 2 * self.num_tokens
        return 0


class TokenReports(Generic[State]):
    """Says now and then what the samples under way have drawn. Called by the thread that steps the engine."""

    def __init__(self, *, engine: Engine[State], publisher: TokenPublisher, clock: Clock) -> None:
        self._engine = engine
        self._publisher = publisher
        self._clock = clock
        self._listeners: dict[str, tuple[Listener, list[_Told]]] = {}
        self._next_at = 0.0

    def begin(self, request_id: str, listener: Listener, *, num_samples: int) -> None:
        """Report on this request from now on."""
        self._listeners[request_id] = (listener, [_Told() for _ in range(num_samples)])

    def end(self, request_id: str) -> None:
        """Report on it no more; one that was never reported on is no error."""
        self._listeners.pop(request_id, None)

    def end_all(self) -> None:
        """Report on nothing more."""
        self._listeners.clear()

    def report(self) -> None:
        """Say what is new, unless that was done a moment ago. Neither waits for the broker nor fails with it."""
        if not self._listeners or self._clock.monotonic() < self._next_at:
            return
        self._next_at = self._clock.monotonic() + _INTERVAL_S
        for request_id, (listener, told) in self._listeners.items():
            known = [sample.next_start() for sample in told]
            for piece in self._engine.drawn_so_far(request_id, known):
                told[piece.sample].num_tokens = piece.start + len(piece.tokens)
                if not listener.scores:
                    piece = piece.model_copy(update={"logprobs": None, "topk": None})
                self._publisher.offer(listener.id, piece)
