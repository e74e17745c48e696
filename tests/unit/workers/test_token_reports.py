"""What listeners are told of samples under way: all of it, soon, and at most three times; others cost nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from harness.clock import HandClock
from twinkle.core.ids import new_id
from twinkle.scheduler.token_stream import Listener, TokenPiece
from twinkle.workers.engines.null_engine import NullEngine, NullState
from twinkle.workers.sampling.token_reports import TokenReports


class GrowingEngine(NullEngine):
    """Holds samples that grow as a test says, and counts who looks at them."""

    def __init__(self) -> None:
        super().__init__(base_model="base", max_rank=8)
        self.drawn: dict[str, list[list[int]]] = {}
        self.num_looks = 0

    def drawn_so_far(self, request_id: str, known: Sequence[int]) -> list[TokenPiece]:
        self.num_looks += 1
        pieces = []
        for sample, tokens in enumerate(self.drawn[request_id]):
            start = known[sample] if known[sample] <= len(tokens) else 0
            if tokens[start:]:
                scores = [0.0] * len(tokens[start:])
                pieces.append(
                    TokenPiece(
                        request_id=request_id, sample=sample, start=start, tokens=tokens[start:], logprobs=scores
                    )
                )
        return pieces


class Said:
    """Remembers what was to be published."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, TokenPiece]] = []

    def offer(self, listener_id: str, piece: TokenPiece) -> None:
        self.pieces.append((listener_id, piece))


class Rig:
    def __init__(self) -> None:
        self.engine, self.said, self.clock = GrowingEngine(), Said(), HandClock()
        self.reports = TokenReports[NullState](
            engine=self.engine,
            publisher=self.said,  # type: ignore[arg-type]
            clock=self.clock,
        )

    def listen(self, request_id: str, *, num_samples: int = 1, scores: bool = False) -> Listener:
        listener = Listener(id=new_id(), scores=scores)
        self.engine.drawn[request_id] = [[] for _ in range(num_samples)]
        self.reports.begin(request_id, listener, num_samples=num_samples)
        return listener

    def report(self) -> list[TokenPiece]:
        """What is said after a moment."""
        before = len(self.said.pieces)
        self.clock.move(1)
        self.reports.report()
        return [piece for _, piece in self.said.pieces[before:]]


def test_only_samples_that_are_listened_to_are_looked_at() -> None:
    rig = Rig()
    rig.engine.drawn["unheard"] = [[1, 2, 3]]

    assert rig.report() == []
    assert rig.engine.num_looks == 0


def test_each_report_goes_on_where_the_last_one_ended() -> None:
    rig = Rig()
    listener = rig.listen("r", num_samples=2)

    rig.engine.drawn["r"] = [[1, 2], []]
    first = rig.report()
    rig.engine.drawn["r"] = [[1, 2, 3], [7]]
    second = rig.report()

    assert [(piece.sample, piece.start, piece.tokens) for piece in first] == [(0, 0, [1, 2])]
    assert [(piece.sample, piece.start, piece.tokens) for piece in second] == [(0, 2, [3]), (1, 0, [7])]
    assert rig.report() == []
    assert {listener_id for listener_id, _ in rig.said.pieces} == {listener.id}


def test_steps_in_quick_succession_are_reported_together() -> None:
    rig = Rig()
    rig.listen("r")
    rig.report()
    looks = rig.engine.num_looks
    for token in range(100):
        rig.engine.drawn["r"][0].append(token)
        rig.clock.move(0.001)
        rig.reports.report()

    assert 1 <= rig.engine.num_looks - looks <= 5


def test_scores_are_only_told_to_those_who_want_them() -> None:
    rig = Rig()
    rig.listen("with", scores=True)
    rig.listen("without")
    rig.engine.drawn = {"with": [[1]], "without": [[1]]}

    assert {piece.request_id: piece.logprobs for piece in rig.report()} == {"with": [0.0], "without": None}


def test_whoever_came_late_hears_everything_before_long_and_all_of_it_is_said_at_most_three_times() -> None:
    rig = Rig()
    rig.listen("r")
    restarts = []
    for num_tokens in range(1, 5001):
        rig.engine.drawn["r"][0].append(num_tokens)
        restarts += [num_tokens for piece in rig.report() if piece.start == 0 and num_tokens > 1]

    assert sum(len(piece.tokens) for _, piece in rig.said.pieces) <= 3 * 5000
    assert all(later <= 2 * earlier + 2 for earlier, later in itertools.pairwise(restarts))
    assert restarts[0] < 100 and restarts[-1] > 2500


def test_a_sample_that_is_drawn_anew_is_told_from_its_start() -> None:
    rig = Rig()
    rig.listen("r")
    rig.engine.drawn["r"] = [[1, 2, 3]]
    rig.report()
    rig.engine.drawn["r"] = [[9]]
    (piece,) = rig.report()

    assert (piece.start, piece.tokens) == (0, [9])


def test_what_has_ended_is_not_looked_at_again() -> None:
    rig = Rig()
    rig.listen("one")
    rig.listen("two")
    rig.reports.end("one")
    rig.reports.end("unknown")
    rig.engine.drawn = {"one": [[1]], "two": [[2]]}
    heard = rig.report()
    rig.reports.end_all()
    rig.engine.drawn["two"][0].append(3)

    assert [piece.request_id for piece in heard] == ["two"]
    assert rig.report() == []
