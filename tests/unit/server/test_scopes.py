"""Keys that may not do everything, and tenants that are suspended: what is refused, at once, and what is not."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import tinker

from harness.fake_worker import BASE_MODEL
from harness.polling import wait_for
from twinkle.core.actor import key_actor
from twinkle.core.scopes import Scope
from twinkle.core.settings import Settings
from twinkle.server.access.scopes import need_of
from twinkle.server.app import create_app

if TYPE_CHECKING:
    from conftest import Api, ServeApi

PATHS = create_app(Settings(redis_url="redis://nowhere")).openapi()["paths"]
ROUTES = [
    (method.upper(), re.sub(r"\{[^}]*\}", "x", path))
    for path, methods in PATHS.items()
    for method in methods
    if method in {"post", "put", "delete", "patch"} and methods[method].get("security")
]


DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([1, 2]),
    loss_fn_inputs={
        "target_tokens": tinker.TensorData(data=[2, 3], dtype="int64", shape=[2]),
        "weights": tinker.TensorData(data=[1.0, 1.0], dtype="float32", shape=[2]),
    },
)


@pytest.fixture(scope="module")
def served(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """An app of its own, with a worker."""
    with serve_api(make_database_url("sqlite")) as api:
        api.worker.start()
        yield api
        api.worker.stop()


def key_of(api: Api, *scopes: Scope, tenant: str = "") -> tuple[str, str]:
    """A tenant's name and a key of it."""
    name = tenant or f"tenant-{secrets.token_hex(8)}"
    return name, api.stores.tenants.create_key(name, "test", scopes=frozenset(scopes) or frozenset(Scope))


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[f"{method} {path}" for method, path in ROUTES])
def test_every_route_that_changes_something_says_what_a_key_must_be_allowed(method: str, path: str) -> None:
    assert need_of(method, path) is not None, "add it to twinkle.server.access.scopes"


def test_a_reading_key_looks_and_collects_and_changes_nothing(served: Api) -> None:
    tenant, full = key_of(served)
    _, reading = key_of(served, Scope.READ, tenant=tenant)
    run = served.sdk(full).create_lora_training_client(BASE_MODEL, rank=8).result()
    passed = run.forward_backward([DATUM], "cross_entropy").result()

    with served.http(reading) as http:
        seen = http.get("/training_runs").json()["training_runs"]
        refused = [
            http.post("/create_session", json={}),
            http.post("/optim_step", json={}),
            http.delete(f"/training_runs/{seen[0]['training_run_id']}/checkpoints/weights/any"),
            http.post(f"{served.url}/api/native/v1/jobs", json={}),
            http.post(f"{served.url}/v1/chat/completions", json={}),
        ]

    assert passed and len(seen) == 1
    assert [answer.status_code for answer in refused] == [403] * len(refused)
    assert "may read and nothing else" in refused[0].json()["detail"]


def test_a_sampling_key_samples_and_trains_nothing(served: Api) -> None:
    _, key = key_of(served, Scope.SAMPLE)
    service = served.sdk(key)
    sampler = service.create_sampling_client(base_model=BASE_MODEL)

    drawn = sampler.sample(
        tinker.ModelInput.from_ints([1, 2]), num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=2)
    ).result()

    assert len(drawn.sequences[0].tokens) == 2
    with pytest.raises(tinker.PermissionDeniedError, match="may read and sample and nothing else"):
        service.create_lora_training_client(BASE_MODEL, rank=8).result()


def test_a_suspended_tenant_begins_nothing_ends_and_reads_what_it_has_and_goes_on_when_resumed(served: Api) -> None:
    tenant, key = key_of(served)
    run = served.sdk(key).create_lora_training_client(BASE_MODEL, rank=8).result()
    accepted = run.forward_backward([DATUM], "cross_entropy")
    saved = run.save_state("kept").result()

    served.stores.tenants.suspend(tenant, "unpaid since May")
    with served.http(key) as http:

        def is_refused() -> bool:
            return http.post("/create_session", json={}).status_code == 403

        wait_for(is_refused, what="the suspension")
        refusal = http.post("/create_session", json={}).json()["detail"]
        reads = http.get("/training_runs").status_code
        collected = accepted.result()
        path = saved.path.removeprefix("tinker://")
        deleted = http.delete(f"/training_runs/{path.split('/')[0]}/checkpoints/{path.split('/', 1)[1]}").status_code
        served.stores.tenants.resume(tenant)
        wait_for(lambda: not is_refused(), what="the resumption")

    assert "unpaid since May" in refusal and collected and (reads, deleted) == (200, 204)
    by_whom = {one.event: one.actor for one in served.stores.audit.entries(start=0, end=2e10)}
    assert by_whom["checkpoint_delete"] == key_actor(served.stores.keyring.find(key).id)
    run.forward_backward([DATUM], "cross_entropy").result()


def test_what_the_operator_does_to_keys_and_tenants_is_written_down_for_the_tenant_to_read(served: Api) -> None:
    tenant, key = key_of(served)
    _, other = key_of(served, tenant=tenant)
    found = served.stores.keyring.find(other)
    served.stores.keyring.rotate(found.id, grace_s=60)
    served.stores.keyring.revoke(found.id)
    served.stores.tenants.suspend(tenant, "a reason")
    served.stores.tenants.resume(tenant)

    account = served.stores.tenants.key(key)
    assert account is not None
    events = [entry.event for entry in served.stores.audit.entries(account.tenant, start=0, end=2e10)]

    assert events == [
        *("apikey_create", "apikey_create", "apikey_create", "apikey_rotate", "apikey_delete"),
        *("tenant_suspend", "tenant_resume"),
    ]
