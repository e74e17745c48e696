"""Losses of clients' own on their way into the journal: the SDK's, resent ones, refused ones, somebody else's."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tinker
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import traced_losses
from harness.calls import retrieve
from harness.hostile import hostile_json, mutated
from harness.traced_losses import encoded
from twinkle.wire.loss_graph import MAX_GRAPH_BYTES, parse_loss_graph

if TYPE_CHECKING:
    from conftest import Api, ServeApi

RANKS = {"logprobs": 1, "weights": 1}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def api(request: pytest.FixtureRequest, serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """A service that runs custom losses."""
    with serve_api(make_database_url(request.param), custom_loss_server_side=True, max_body_bytes=2**21) as served:
        served.worker.start()
        yield served
        served.worker.stop()


def body_of(session_id: str, *, number: int = 0) -> dict[str, Any]:
    return encoded(traced_losses.likelihood, RANKS, session=session_id, number=number)


def refused(session_id: str, number: int) -> dict[str, Any]:
    body = body_of(session_id, number=number)
    body["graph"]["nodes"][2]["target"] = "os.system"
    return body


def create(http: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    return http.post("/create_custom_loss", json=body)


def test_a_loss_of_the_sdk_is_kept_and_has_an_id(api: Api) -> None:
    with api.sdk(api.new_key()) as client:
        handle = client.create_custom_loss(traced_losses.likelihood, RANKS).result()
        other = client.create_custom_loss(traced_losses.ranked, {"logprobs": 1, "rewards": 1}).result()

    assert handle.loss_id == f"{handle.session_id}:loss:0"
    assert other.loss_id == f"{handle.session_id}:loss:1"
    definition = api.state().queue.journal.loss_definition(f"{handle.session_id}:loss", 1)
    assert definition is not None
    assert parse_loss_graph(definition).name == "ranked"


def test_a_loss_the_service_does_not_offer_fails_in_its_future_and_says_which_node(api: Api) -> None:
    def drawn(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with api.sdk(api.new_key()) as client, pytest.raises(tinker.RequestFailedError, match="rand_like") as caught:
        client.create_custom_loss(drawn, {"logprobs": 1}).result()

    assert caught.value.category == tinker.types.RequestErrorCategory.User


def test_a_resend_gets_the_same_future_and_another_loss_under_its_number_none(
    http: httpx.Client, session_id: str
) -> None:
    first = create(http, body_of(session_id))
    again = create(http, body_of(session_id))
    other = create(http, encoded(traced_losses.ranked, {"logprobs": 1, "rewards": 1}, session=session_id))

    assert first.json() == again.json() == {"request_id": f"{session_id}:loss:req:0"}
    assert retrieve(http, first.json()["request_id"]).json() == {
        "loss_id": f"{session_id}:loss:0",
        "type": "create_custom_loss",
    }
    assert (other.status_code, other.json()["code"]) == (400, "conflict")


def test_a_refused_loss_stays_refused_when_it_is_sent_again(http: httpx.Client, session_id: str) -> None:
    tickets = [create(http, refused(session_id, 3)).json()["request_id"] for _ in range(2)]

    failures = [retrieve(http, ticket).json() for ticket in tickets]

    assert failures[0] == failures[1]
    assert failures[0]["category"] == "user"
    assert "os.system" in failures[0]["error"]


def test_a_body_beyond_the_limit_is_refused_in_its_future(http: httpx.Client, session_id: str) -> None:
    body = body_of(session_id)
    body["graph"]["nodes"][2]["args"] += [0.123456789] * (MAX_GRAPH_BYTES // 10)

    failure = retrieve(http, create(http, body).json()["request_id"]).json()

    assert str(MAX_GRAPH_BYTES) in failure["error"]


def test_another_tenants_session_is_one_that_does_not_exist(api: Api, session_id: str) -> None:
    with api.http(api.new_key()) as stranger:
        theirs = create(stranger, body_of(session_id))
        nobodys = create(stranger, body_of("11111111-2222-3333-4444-555555555555"))

    assert (theirs.status_code, nobodys.status_code) == (404, 404)
    assert api.state().queue.journal.loss_definition(f"{session_id}:loss", 0) is None


def test_nothing_but_losses_goes_where_losses_are_numbered(http: httpx.Client, session_id: str) -> None:
    create(http, body_of(session_id))
    sample = {
        "sampling_session_id": f"{session_id}:loss",
        "seq_id": 9,
        "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 1},
    }

    answers = [
        http.post("/asample", json=sample),
        http.post("/optim_step", json={"model_id": f"{session_id}:loss", "seq_id": 1, "adam_params": {}}),
    ]

    assert [answer.status_code for answer in answers] == [404, 404]


def test_the_account_knows_nothing_of_losses(http: httpx.Client, session_id: str) -> None:
    before = http.get("/billing/usage/events").json()
    create(http, body_of(session_id))

    assert http.get("/billing/usage/events").json() == before


def test_where_it_is_off_the_sdk_keeps_its_losses_to_itself(serve_api: ServeApi, make_database_url: Any) -> None:
    with serve_api(make_database_url("sqlite")) as api, api.sdk(key := api.new_key()) as client:
        handle = client.create_custom_loss(traced_losses.likelihood, RANKS).result()
        with api.http(key) as http:
            told = create(http, body_of(handle.session_id))

    assert handle.loss_id is None
    assert (told.status_code, told.json()["code"]) == (400, "invalid_input")
    assert "off on this server" in told.json()["detail"]


@settings(max_examples=60, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_sent_gets_a_future_or_a_refusal(data: st.DataObject, http: httpx.Client, session_id: str) -> None:
    template = copy.deepcopy(encoded(traced_losses.ranked, {"logprobs": 1, "rewards": 1}, session=session_id))
    template["custom_loss_seq_id"] = data.draw(st.integers(10, 900))
    raw = data.draw(hostile_json(template) | mutated(json.dumps(template).encode()))

    answer = http.post("/create_custom_loss", content=raw, headers={"content-type": "application/json"})

    assert answer.status_code in {200, 400, 404, 413}
    if answer.status_code == 200:
        outcome = retrieve(http, answer.json()["request_id"])
        assert outcome.status_code == 200
        assert outcome.json().keys() >= {"loss_id"} or outcome.json()["category"] == "user"
