"""Polls that are held: so many of one tenant and of one key; nobody else's wait for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx

from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL
from harness.polling import wait_until

if TYPE_CHECKING:
    from conftest import ServeApi


def _ticket(client: httpx.Client) -> str:
    session = client.post("/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    return str(client.post("/create_model", json=body).json()["request_id"])


def test_one_key_and_one_tenant_hold_so_many_polls_and_others_go_on(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    limits = {"max_requests_per_key": 2, "tenant_max_requests": 3, "long_poll_s": 30}
    with serve_api(make_database_url("sqlite"), **limits) as api, ThreadPoolExecutor(4) as pool:
        api.worker.register()
        key, stranger = api.new_key(), api.new_key()
        tenant = api.stores.tenants.key(key)
        assert tenant is not None
        name = next(account.name for account in api.stores.tenants.all() if account.id == tenant.tenant)
        second = api.stores.tenants.create_key(name, "second")
        with api.http(key) as own, api.http(second) as sibling, api.http(stranger) as other:
            ticket, their_ticket = _ticket(own), _ticket(other)
            poll = {"request_id": ticket}
            held = [pool.submit(own.post, "/retrieve_future", json=poll) for _ in range(2)]
            in_progress = api.state().common.in_progress
            wait_until(lambda: in_progress.num_of(tenant.tenant) == 2, what="two polls to be held")

            beyond_key = own.post("/session_heartbeat", json={"session_id": "none"})
            held.append(pool.submit(sibling.post, "/retrieve_future", json=poll))
            wait_until(lambda: in_progress.num_of(tenant.tenant) == 3, what="three polls to be held")
            beyond_tenant = sibling.get("/training_runs")
            listed = other.get("/training_runs")

            api.worker.start()
            answers = [poll.result().status_code for poll in held]
            wait_until(lambda: in_progress.num_of(tenant.tenant) == 0, what="the answers to have left")
            again = sibling.get("/training_runs")
            theirs = retrieve(other, their_ticket)
            api.worker.stop()

    assert (beyond_key.status_code, beyond_tenant.status_code) == (429, 429)
    assert "(of this key)" in beyond_key.json()["detail"] and "(yours)" in beyond_tenant.json()["detail"]
    assert (listed.status_code, again.status_code, theirs.status_code) == (200, 200, 200)
    assert answers == [200, 200, 200]
