"""What came of a call whose client did not wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from harness.fake_worker import BASE_MODEL
from harness.journal import digest
from twinkle.core.adapter import AdapterConfig, Dialect
from twinkle.core.operation import Accepted, Failure, FailureCategory, OperationKind, Payload, Unnumbered
from twinkle.storage.journal.records import NewAdapter
from twinkle.wire.calls import Call, encode_call

if TYPE_CHECKING:
    from conftest import Api

CONFIG = AdapterConfig(base_model=BASE_MODEL, rank=8, seed=1, dialect=Dialect.TWINKLE)


def _unnumbered(tenant: str, lane: str, kind: OperationKind, payload: bytes) -> Unnumbered:
    return Unnumbered(tenant=tenant, lane=lane, kind=kind, digest=digest(payload), payload=Payload(inline=payload))


def _adapter(api: Api, key: str, session_id: str) -> tuple[str, str]:
    """A run, and whose it is."""
    valid = api.stores.tenants.key(key)
    assert valid is not None
    tenant = valid.tenant
    new = NewAdapter(
        id="",
        tenant=tenant,
        session=session_id,
        mesh="default",
        config=CONFIG,
        optimizer={},
        user_metadata=None,
        created_at=0.0,
    )
    first = _unnumbered(tenant, "", OperationKind.CREATE_MODEL, CONFIG.model_dump_json().encode())
    accepted = api.stores.named_adapters.open(new, name="a", first=first)
    return accepted.request_id.removesuffix(":req:0"), tenant


def _called(api: Api, tenant: str, run: str, method: str = "step") -> str:
    call = _unnumbered(tenant, run, OperationKind.CALL, encode_call(Call(method=method)))
    (accepted,) = api.stores.journal.append([call])
    assert isinstance(accepted, Accepted)
    return accepted.request_id


def _future(http: httpx.Client, request_id: str, wait_s: float = 10) -> httpx.Response:
    return http.get(f"/twinkle/futures/{request_id}", params={"wait_s": wait_s})


def test_a_call_s_future_gives_what_the_call_would_have_answered_and_202_until_then(
    api: Api, http: httpx.Client, key: str, session_id: str
) -> None:
    run, tenant = _adapter(api, key, session_id)
    with api.worker.paused():
        request_id = _called(api, tenant, run)
        pending = _future(http, request_id, wait_s=0)
    ended = _until_ended(http, request_id)
    created = _until_ended(http, f"{run}:req:0")

    assert pending.status_code == 202
    assert pending.json()["request_id"] == request_id
    assert (ended.status_code, ended.json()) == (200, {"result": {"method": "step", "seq": 1}})
    assert created.json() == {"status": "ok", "adapter_name": f"{session_id}-a", "training_run_id": run}


def test_a_call_that_failed_is_answered_with_words_and_a_code(
    api: Api, http: httpx.Client, key: str, session_id: str
) -> None:
    run, tenant = _adapter(api, key, session_id)
    answers = []
    for category, code in ((FailureCategory.USER, "invalid_input"), (FailureCategory.USER, "not_found")):
        failure = Failure(message="no loss of that name", category=category, code=code)
        api.worker.failing = lambda _, failure=failure: failure  # type: ignore[misc]
        answers.append(_until_ended(http, _called(api, tenant, run)))
    api.worker.failing = None

    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (400, {"detail": "no loss of that name", "code": "invalid_input"}),
        (404, {"detail": "no loss of that name", "code": "not_found"}),
    ]


def test_futures_of_others_and_of_the_other_dialect_are_not_found(
    api: Api, http: httpx.Client, key: str, session_id: str, model_id: str
) -> None:
    run, tenant = _adapter(api, key, session_id)
    request_id = _called(api, tenant, run)
    with api.http(api.new_key()) as stranger:
        answers = [_future(stranger, request_id), _future(http, f"{model_id}:req:0"), _future(http, "no such")]

    assert [answer.status_code for answer in answers] == [404, 404, 404]


def _until_ended(http: httpx.Client, request_id: str) -> httpx.Response:
    for _ in range(40):
        answer = _future(http, request_id)
        if answer.status_code != 202:
            break
    return answer
