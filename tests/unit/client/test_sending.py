"""Sending: what is tried again, what is not, and how a run's operations keep their order whatever happens to one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from harness.scripted_server import Reply, ScriptedServer, Seen
from harness.servers import free_port
from twinkle.client import AsyncClient, Client
from twinkle.client.backoff import RetryPolicy
from twinkle.client.endpoint import find_endpoint
from twinkle.client.errors import (
    BadAnswer,
    Cancelled,
    ClientClosed,
    Conflict,
    InvalidInput,
    NotFound,
    Overloaded,
    RunClosed,
    Unauthenticated,
    Unavailable,
)
from twinkle.client.run import Run
from twinkle.client.transport import Request, Transport

KEY = "tml-test"
RUN_ID = "s:train:0"
ENDPOINT = find_endpoint("http://127.0.0.1:1", KEY, environment={})


def refusal(status: int, code: str, detail: str = "because") -> Reply:
    return Reply(status, {"detail": detail, "code": code})


def in_turn(*replies: Reply) -> Callable[[Seen], Reply]:
    left = list(replies)
    return lambda _: left.pop(0)


async def send(server: ScriptedServer, *, give_up_after_s: float = 30.0) -> bytes:
    policy = RetryPolicy(first_s=0.01, give_up_after_s=give_up_after_s, draw=lambda: 0.0)
    transport = Transport(find_endpoint(server.url, KEY), policy)
    try:
        return await transport.send(Request(path="/thing", content=b'{"n":1}'))
    finally:
        await transport.close()


async def test_hang_ups_and_outages_are_tried_again_with_the_same_body() -> None:
    replies = in_turn(Reply(None), refusal(503, "storage_unavailable"), refusal(502, ""), Reply(200, "done"))
    with ScriptedServer(replies) as server:
        assert json.loads(await send(server)) == "done"

    assert server.seen == [Seen("/thing", b'{"n":1}')] * 4


async def test_the_server_says_when_to_come_back() -> None:
    replies = in_turn(Reply(429, {"detail": "full"}, {"Retry-After": "1"}), Reply(200, "done"))
    started = time.monotonic()
    with ScriptedServer(replies) as server:
        await send(server)

    assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (refusal(401, "unauthenticated"), Unauthenticated),
        (refusal(404, "not_found"), NotFound),
        (refusal(400, "conflict"), Conflict),
        (refusal(400, "invalid_input", "rank: must be at most 8"), InvalidInput),
        (Reply(404, "a proxy's page"), NotFound),
    ],
)
async def test_a_refusal_is_not_tried_again(reply: Reply, error: type[Exception]) -> None:
    with ScriptedServer(lambda _: reply) as server:
        with pytest.raises(error):
            await send(server)
        assert len(server.seen) == 1


@pytest.mark.parametrize(("reply", "error"), [(refusal(429, "overloaded"), Overloaded), (Reply(None), Unavailable)])
async def test_it_gives_up_when_the_time_is_up(reply: Reply, error: type[Exception]) -> None:
    with ScriptedServer(lambda _: reply) as server:
        with pytest.raises(error):
            await send(server, give_up_after_s=0.1)
        assert len(server.seen) > 1 or error is Overloaded


def test_delays_double_with_jitter_up_to_a_limit() -> None:
    least, most = (
        RetryPolicy(first_s=1, longest_s=8, draw=lambda: 0.0),
        RetryPolicy(first_s=1, longest_s=8, draw=lambda: 1.0),
    )

    assert [least.delay_s(attempt) for attempt in range(5)] == [0.5, 1, 2, 4, 4]
    assert [most.delay_s(attempt) for attempt in range(5)] == [1, 2, 4, 8, 8]
    assert least.delay_s(0, retry_after_s=3) == 3.5
    assert most.delay_s(10_000) == 8


class Journal:
    """Accepts operations under their numbers, and keeps their polls open."""

    def __init__(self, judge: Callable[[int], Reply | None] = lambda _: None) -> None:
        self.accepted: list[tuple[int, float]] = []
        self._judge = judge

    def __call__(self, seen: Seen) -> Reply:
        if seen.path.endswith("/collect"):
            time.sleep(0.02)
            return Reply(200, {"ended": []})
        if not seen.path.endswith("/optim_step"):
            return Reply(200, {"run_id": RUN_ID, "session_id": "s", "base_model": "b", "rank": 8, "next_seq": 5})
        body = json.loads(seen.content)
        answer = self._judge(body["seq_id"])
        if answer is not None:
            return answer
        if body["seq_id"] not in [seq for seq, _ in self.accepted]:
            self.accepted.append((body["seq_id"], body["adam_params"]["learning_rate"]))
        return Reply(200, {"request_id": f"{RUN_ID}:req:{body['seq_id']}", "model_id": RUN_ID})


def connect(server: ScriptedServer, **options: float) -> tuple[Client, Run]:
    client = Client(server.url, KEY, **options)
    return client, client.attach(RUN_ID)


def test_numbers_go_on_from_the_servers_count_in_the_order_of_the_calls() -> None:
    journal = Journal()
    with ScriptedServer(journal) as server:
        client, run = connect(server)
        futures = [run.optim_step(rate) for rate in (0.1, 0.2, 0.3)]
        assert futures[-1].accepted().result(10) == f"{RUN_ID}:req:7"
        client.close()

    assert journal.accepted == [(5, 0.1), (6, 0.2), (7, 0.3)]


def test_a_lost_answer_is_asked_for_again_under_the_same_number() -> None:
    losses = [Reply(None), refusal(503, "storage_unavailable")]
    journal = Journal(lambda seq: losses.pop() if seq == 6 and losses else None)
    with ScriptedServer(journal) as server:
        client, run = connect(server)
        futures = [run.optim_step(rate) for rate in (0.1, 0.2, 0.3)]
        assert [future.accepted().result(10)[-1] for future in futures] == ["5", "6", "7"]
        client.close()

    assert journal.accepted == [(5, 0.1), (6, 0.2), (7, 0.3)]


def test_a_cancelled_operation_leaves_no_hole() -> None:
    outage = [True]
    journal = Journal(lambda _: refusal(503, "storage_unavailable") if outage else None)
    with ScriptedServer(journal) as server:
        client, run = connect(server)
        first, second, third = (run.optim_step(rate) for rate in (0.1, 0.2, 0.3))
        assert second.cancel()
        outage.clear()
        third.accepted().result(10)
        with pytest.raises(Cancelled):
            second.result(0)
        assert not first.cancel()
        client.close()

    assert journal.accepted == [(5, 0.1), (6, 0.3)]


def test_nothing_is_applied_behind_an_operation_that_was_refused() -> None:
    journal = Journal(lambda seq: refusal(400, "conflict", "used already") if seq == 6 else None)
    with ScriptedServer(journal) as server:
        client, run = connect(server)
        accepted, refused, behind = (run.optim_step(rate) for rate in (0.1, 0.2, 0.3))
        assert accepted.accepted().result(10)
        with pytest.raises(Conflict):
            refused.result(10)
        with pytest.raises(RunClosed, match="attach"):
            behind.result(10)
        with pytest.raises(RunClosed):
            run.optim_step().result(10)
        client.close()

    assert journal.accepted == [(5, 0.1)]


def test_closing_hands_over_what_is_queued_and_says_where_the_rest_is() -> None:
    journal = Journal()
    with ScriptedServer(journal) as server:
        client, run = connect(server)
        futures = [run.optim_step() for _ in range(20)]
        client.close()
        client.close()

        assert len(journal.accepted) == 20
        with pytest.raises(ClientClosed, match=r"client\.future"):
            futures[0].result(0)
        with pytest.raises(ClientClosed):
            run.optim_step()


def test_what_is_no_twinkle_server_is_told_from_one() -> None:
    with ScriptedServer(lambda _: Reply(200, "welcome to the router")) as server:
        client = Client(server.url, KEY)
        with pytest.raises(BadAnswer, match="Twinkle server"):
            client.models()
        client.close()


def test_a_sample_that_was_never_handed_over_ends_with_the_client() -> None:
    def reply(seen: Seen) -> Reply:
        if seen.path.endswith("/asample"):
            return refusal(503, "storage_unavailable")
        return Reply(200, {"session_id": "s", "sampling_session_id": "s:sample:0"})

    with ScriptedServer(reply) as server:
        client = Client(server.url, KEY)
        sample = client.sampler(base_model="b").sample([1], max_tokens=1)
        client.close(flush_timeout_s=0.2)

        with pytest.raises(ClientClosed):
            sample.result(0)
        with pytest.raises(ClientClosed):
            sample.accepted().result(0)


def test_a_server_that_is_away_is_an_error_in_the_end() -> None:
    with pytest.raises(Unavailable), Client(f"http://127.0.0.1:{free_port()}", KEY, give_up_after_s=0.2) as client:
        client.models()


async def test_the_asynchronous_client_works_in_the_loop_of_its_caller() -> None:
    journal = Journal()
    with ScriptedServer(journal) as server:
        async with AsyncClient(server.url, KEY) as client:
            run = await client.attach(RUN_ID)
            assert await run.optim_step().accepted() == f"{RUN_ID}:req:5"
            with pytest.raises(RuntimeError, match="await"):
                run.optim_step().result(1)
