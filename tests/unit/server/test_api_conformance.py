"""Every route keeps to the OpenAPI document, whatever is sent: what fits its schemas, and what does not quite.

Schemathesis makes the requests of the document; what no schema leads to is in test_hostile_requests.py. PostgreSQL is
the database that refuses more; the other one has its turn in soak.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.errors import UnsupportedSchema
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from harness.victim import ANSWER_S, REVOKE, Victim, attacked
from twinkle.core.settings import Settings
from twinkle.server.app import create_app
from twinkle.server.errors import JSON

if TYPE_CHECKING:
    from conftest import Api

DOCUMENT = create_app(Settings(redis_url="redis://nowhere")).openapi()
# The tenant's own key is sent.
CONFIG = SchemathesisConfig.from_dict({"generation": {"with-security-parameters": False}})
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT, config=CONFIG)
# These wait for the outcome, so their worker must work; it would also make the samples that others ask for.
DRAWING = {"/v1/completions", "/v1/chat/completions", "/v1/fine_tuning/alpha/graders/run"}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Whose answer may be 503: of a mesh that is not there, for one. The document has that, and no other of 500 and more.
TELLING = {"/api/v1/readyz", "/api/v1/livez"}
# Graders hold graders: of some ways not to fit such a schema Schemathesis says that it cannot make them.
NESTED = {"/v1/fine_tuning/alpha/graders/validate", "/v1/fine_tuning/alpha/graders/run"}
# A call that would wait for a worker, which may rest, is answered with its ticket.
HEADERS = {"Prefer": "respond-async"}
HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def _operations(*, drawing: bool) -> Iterator[APIOperation]:
    for result in SCHEMA.get_all_operations():
        operation = result.ok()
        if (operation.method.upper(), operation.path) == REVOKE or not _is_json(operation):
            continue
        if (operation.path in DRAWING) == drawing:
            yield operation


def _is_json(operation: APIOperation) -> bool:
    """Protobuf is for test_hostile_requests.py and the decoder's own tests."""
    body = DOCUMENT["paths"][operation.path][operation.method.lower()].get("requestBody")
    return body is None or JSON in body["content"]


def attack(victim: Victim, operation: APIOperation, data: st.DataObject, **few: int) -> None:
    case = _drawn(operation, data)
    case.path_parameters = victim.aimed(case.path_parameters)
    case.query = victim.aimed(case.query)
    case.body = victim.aimed(case.body)
    if isinstance(case.body, dict):
        case.body = {key: few.get(key, value) for key, value in case.body.items()}
    checks = CHECKS[1:] if operation.path in TELLING else CHECKS
    with requests.Session() as session:
        case.call_and_validate(
            victim.base_url, session, headers=HEADERS | {"X-API-Key": victim.key}, checks=checks, timeout=ANSWER_S
        )


def _drawn(operation: APIOperation, data: st.DataObject) -> Case:
    mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    try:
        return data.draw(operation.as_strategy(mode))
    except UnsupportedSchema:
        if mode is GenerationMode.POSITIVE or operation.path not in NESTED:
            raise
        reject()


def label(operation: APIOperation) -> str:
    return operation.label


@pytest.mark.parametrize("victim", ["postgres"], indirect=True)
@pytest.mark.parametrize("operation", _operations(drawing=False), ids=label)
@settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=HEALTH)
@given(data=st.data())
def test_every_answer_is_one_that_the_document_knows(
    victim: Victim, operation: APIOperation, data: st.DataObject
) -> None:
    attack(victim, operation, data)


@pytest.mark.parametrize("api", ["postgres"], indirect=True)
@pytest.mark.parametrize("operation", _operations(drawing=True), ids=label)
@settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=HEALTH)
@given(data=st.data())
def test_so_is_every_answer_with_samples(api: Api, operation: APIOperation, data: st.DataObject) -> None:
    with attacked(api, resting=False) as victim:
        attack(victim, operation, data, n=2, max_tokens=4, max_completion_tokens=4)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", _operations(drawing=False), ids=label)
@settings(max_examples=150, deadline=None, database=None, suppress_health_check=HEALTH)
@given(data=st.data())
def test_every_answer_of_very_many_is(victim: Victim, operation: APIOperation, data: st.DataObject) -> None:
    attack(victim, operation, data)
