"""What one listens to of a sample under way: its beginning without a gap, and never more than was asked for."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.scheduler.token_stream import TokenPiece
from twinkle.server.answering.token_feeds import Expected, HeardSample, TokenFeeds

MAX_TOKENS = 40
WANTED = Expected(num_samples=1, max_tokens=MAX_TOKENS, topk=None)


def piece(tokens: list[int], *, start: int = 0, sample: int = 0, **more: object) -> TokenPiece:
    values = {"request_id": "r", "sample": sample, "start": start, "tokens": tokens, **more}
    return TokenPiece.model_validate(values)


@settings(max_examples=150, deadline=None)
@given(
    truth=st.lists(st.integers(0, 3), max_size=MAX_TOKENS),
    cuts=st.lists(st.tuples(st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS)), max_size=12),
    takes=st.sets(st.integers(0, 11)),
)
def test_pieces_in_any_order_lost_or_doubled_give_the_beginning_of_the_truth(
    truth: list[int], cuts: list[tuple[int, int]], takes: set[int]
) -> None:
    heard = HeardSample(WANTED)
    taken = []
    for i, (start, length) in enumerate(cuts):
        heard.hear(piece(truth[start : start + length], start=start))
        if i in takes:
            taken += heard.take()
    taken += heard.take()

    assert not heard.is_disputed
    assert [token for token, _, _ in taken] == heard.tokens == truth[: len(heard.tokens)]


def test_after_a_contradiction_nothing_more_is_believed() -> None:
    heard = HeardSample(WANTED)
    heard.hear(piece([1, 2, 3]))
    heard.hear(piece([2, 9, 4], start=1))
    heard.hear(piece([4, 5], start=3))
    heard.hear(piece([1, 2, 3, 4, 5]))

    assert [token for token, _, _ in heard.take()] == [1, 2, 3]


def test_however_much_is_said_no_more_is_kept_than_a_sample_can_have() -> None:
    heard = HeardSample(WANTED)
    for _ in range(3):
        for start in range(0, 5000, 50):
            heard.hear(piece([7] * 1000, start=min(start, len(heard.tokens))))

    assert len(heard.tokens) == len(heard.unread) == MAX_TOKENS


def test_a_piece_without_the_scores_that_were_asked_for_is_not_taken() -> None:
    heard = HeardSample(Expected(num_samples=1, max_tokens=MAX_TOKENS, topk=2))
    heard.hear(piece([1]))
    heard.hear(piece([1], logprobs=[-1.0]))
    heard.hear(piece([1], logprobs=[-1.0], topk=[[(1, -1.0)]]))
    assert heard.take() == []

    heard.hear(piece([1], logprobs=[-1.0], topk=[[(1, -1.0), (2, -2.0)]]))
    assert heard.take() == [(1, -1.0, [(1, -1.0), (2, -2.0)])]


async def test_only_those_who_listen_hear_and_only_while_they_do() -> None:
    feeds = TokenFeeds()
    changed, other = asyncio.Event(), asyncio.Event()
    with feeds.open({"r": WANTED}, changed) as (first,), feeds.open({"r": WANTED, "s": WANTED}, other) as (second, _):
        await asyncio.to_thread(feeds.hear, [piece([1, 2]).model_dump_json(), "rubbish"])
        await asyncio.wait_for(asyncio.gather(changed.wait(), other.wait()), 10)
        assert first.samples[0].tokens == second.samples[0].tokens == [1, 2]
        assert feeds.num_listeners == 3

    changed.clear()
    await asyncio.to_thread(feeds.hear, [piece([1, 2, 3]).model_dump_json()])
    await asyncio.sleep(0)
    assert feeds.num_listeners == 0
    assert not changed.is_set()
    assert first.samples[0].tokens == [1, 2]
