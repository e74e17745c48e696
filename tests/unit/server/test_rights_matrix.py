"""The attack matrix from within: every route x a tenant's own ids x its keys of few rights, and its lack of any.

Whatever the table of scopes says of a route, what counts are the rows of the journal afterwards: a key that may only
look leaves all as they were, one that may only sample makes no runs or checkpoints, a suspended tenant begins nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
import sqlalchemy as sa

from harness.attacked_routes import ROUTES, Route, ids_of_nothing, send
from harness.polling import wait_for
from harness.victim import ANSWER_S, Victim, attacked
from twinkle.core.scopes import Scope
from twinkle.core.settings import Settings
from twinkle.server.app import create_app
from twinkle.storage.sql_engine import sql_engine

if TYPE_CHECKING:
    from conftest import Api, ServeApi

_DOCUMENT = create_app(Settings(redis_url="redis://nowhere")).openapi()["paths"]
GUARDED = [
    route
    for route in ROUTES
    if _DOCUMENT[route.path][route.method.lower()].get("security", []) not in ([], [{"adminKey": []}])
]
LOOKING = {
    "POST /api/v1/retrieve_future",
    "POST /api/v1/retrieve_futures",
    "POST /api/v1/get_info",
    "POST /api/v1/weights_info",
    "POST /api/v1/auth/token",
    "POST /api/v1/telemetry",
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/session_heartbeat",
    "POST /api/v1/sessions/search",
    "POST /api/v1/sessions/{session_id}/finish",
    "POST /api/v1/twinkle/session_heartbeat",
    "POST /api/v1/twinkle/weights_info",
    "POST /api/native/v1/futures/collect",
    "POST /api/native/v1/count_tokens",
}
"""What a key that may only look can do beside GET; nothing else may join it unseen."""
SECRETS = {"GET /api/native/v1/jobs/webhook_secret"}
"""With what they tell, more could be done than looking."""
BY_SAMPLING = {("operation", "sample"), ("job", "batch")}
_OUR_REFUSAL = "and nothing else; use a key of the same tenant"


@pytest.fixture(scope="module")
def served(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """An app of its own: what is attacked here is used up."""
    url = make_database_url("sqlite")
    with serve_api(url, long_poll_s=0.2, max_outstanding_samples=1_000_000, custom_loss_server_side=True) as api:
        api.worker.start()
        yield api
        api.worker.stop()


@pytest.fixture
def owner(served: Api) -> Iterator[Victim]:
    """A tenant that owns one of everything."""
    with attacked(served) as one:
        yield one


class Tenant:
    """Who owns something, and what is known of it behind the API's back."""

    def __init__(self, api: Api, owner: Victim) -> None:
        self.api, self.owner = api, owner
        self.name = api.stores.keyring.find(owner.key).tenant
        self._engine = sql_engine(api.stores.database.url)

    def key(self, *scopes: Scope, expires_at: float | None = None) -> str:
        allowed = frozenset(scopes) or frozenset(Scope)
        return self.api.stores.tenants.create_key(self.name, "few", scopes=allowed, expires_at=expires_at)

    def rows(self) -> dict[str, int]:
        """How many there are in each table of the journal, but for what tells who called."""
        with self._engine.connect() as connection:
            return {
                name: connection.execute(sa.text(f"SELECT count(*) FROM {name}")).scalar_one()
                for name in sa.inspect(self._engine).get_table_names()
                if name != "audit"
            }

    def kinds(self) -> set[tuple[str, str]]:
        """Of the operations and jobs that there are."""
        with self._engine.connect() as connection:
            return {
                (table, kind)
                for table in ("operation", "job")
                for (kind,) in connection.execute(sa.text(f"SELECT kind FROM {table}"))
            }


@pytest.fixture
def tenant(served: Api, owner: Victim) -> Tenant:
    return Tenant(served, owner)


def sweep(tenant: Tenant, key: str, ids: dict[str, str] | None = None) -> dict[Route, httpx.Response]:
    """What every route answers to a key."""
    owner = tenant.owner
    with httpx.Client(base_url=owner.base_url, timeout=ANSWER_S) as client:
        return {route: send(client, route, ids or owner.ids, owner, key) for route in GUARDED}


def refused(answers: dict[Route, httpx.Response], words: str = _OUR_REFUSAL) -> set[str]:
    """The routes that a key was kept from."""
    assert {str(route): answer.text for route, answer in answers.items() if answer.status_code >= 500} == {}
    return {str(route) for route, answer in answers.items() if answer.status_code == 403 and words in answer.text}


def grown(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """The tables with more rows than before."""
    return {name for name in after if after[name] > before[name]}


def test_a_key_that_may_look_is_kept_from_all_else_on_every_route_and_leaves_everything_as_it_was(
    tenant: Tenant,
) -> None:
    key = tenant.key(Scope.READ)
    before = tenant.rows()

    answers = sweep(tenant, key)
    of_nothing = sweep(tenant, key, ids_of_nothing(tenant.owner))

    assert tenant.rows() == before
    looks = {str(route) for route in GUARDED if route.method == "GET" or str(route) in LOOKING} - SECRETS
    assert refused(answers) == {str(route) for route in GUARDED} - looks == refused(of_nothing)


def test_a_key_that_may_sample_makes_no_run_no_checkpoint_and_no_token_on_any_route(tenant: Tenant) -> None:
    key = tenant.key(Scope.READ, Scope.SAMPLE)
    before, kinds_before = tenant.rows(), tenant.kinds()

    kept_from = refused(sweep(tenant, key))

    assert kept_from >= SECRETS and not LOOKING & kept_from
    assert not grown(before, tenant.rows()) & {"adapter", "checkpoint", "access_token", "push", "named_adapter"}
    assert tenant.kinds() - kinds_before <= BY_SAMPLING
    assert {"POST /api/v1/asample", "POST /v1/chat/completions", "POST /v1/files"}.isdisjoint(kept_from)


def test_a_key_that_may_train_is_kept_from_no_route(tenant: Tenant) -> None:
    assert refused(sweep(tenant, tenant.key(Scope.READ, Scope.TRAIN))) == set()


def test_a_suspended_tenant_begins_nothing_on_any_route(tenant: Tenant) -> None:
    key = tenant.key()
    tenant.api.stores.tenants.suspend(tenant.name, "unpaid since May")
    with tenant.api.http(key) as http:
        wait_for(lambda: http.post("/create_session", json={}).status_code == 403, what="the suspension")
    before, kinds_before = tenant.rows(), tenant.kinds()

    answers = sweep(tenant, key)

    # A run and a checkpoint ended, which leaves a trace.
    assert grown(before, tenant.rows()) <= {"doomed_blob", "past_checkpoint", "operation"}
    assert tenant.kinds() - kinds_before <= {("operation", "unload_model")}
    kept_from = refused(answers, "unpaid since May")
    assert "POST /api/v1/create_model" in kept_from
    assert not [route for route in kept_from if route.startswith(("GET", "DELETE")) or "cancel" in route]


@pytest.mark.parametrize("ended", ["revoked", "expired"])
def test_a_key_that_has_ended_opens_no_route_and_leaves_everything_as_it_was(tenant: Tenant, ended: str) -> None:
    key = tenant.key(expires_at=time.time() - 1 if ended == "expired" else None)
    if ended == "revoked":
        tenant.api.stores.keyring.revoke(key)
    before = tenant.rows()

    answers = sweep(tenant, key)

    assert {str(route): answer.text for route, answer in answers.items() if answer.status_code != 401} == {}
    assert tenant.rows() == before
