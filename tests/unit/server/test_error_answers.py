"""Errors over HTTP: the status, the one form, and nothing of the server's insides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from structlog.testing import capture_logs

from twinkle.core import errors
from twinkle.server.errors import install_error_answers

if TYPE_CHECKING:
    from conftest import ServeApi


def _client(error: Exception) -> TestClient:
    app = FastAPI()
    install_error_answers(app)

    @app.get("/")
    async def fail() -> None:
        raise error

    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidInput("rank", "must be 1"), 400, "invalid_input"),
        (errors.Conflict("used"), 400, "conflict"),
        (errors.NotFound("none"), 404, "not_found"),
        (errors.Unauthenticated("who"), 401, "unauthenticated"),
        (errors.TooLarge("big"), 413, "too_large"),
        (errors.Expired("gone"), 410, "expired"),
        (errors.WindowFailed("window"), 400, "window_failed"),
        (errors.Overloaded("full"), 429, "overloaded"),
        (errors.MeshUnavailable("away"), 503, "mesh_unavailable"),
    ],
)
def test_every_error_has_its_status_and_says_what_happened(error: errors.TwinkleError, status: int, code: str) -> None:
    answer = _client(error).get("/")

    assert answer.status_code == status
    assert answer.json() == {"detail": error.message, "code": code}
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert ("retry-after" in answer.headers) == error.retryable


def test_no_error_is_ever_a_409() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TwinkleError)]

    for kind in kinds:
        error = kind("field", "message") if issubclass(kind, errors.InvalidInput) else kind("message")
        assert _client(error).get("/").status_code != 409


def test_what_the_storage_says_stays_inside() -> None:
    answer = _client(errors.StorageUnavailable("cannot open /srv/secret/journal.db")).get("/")

    assert answer.status_code == 503
    assert "secret" not in answer.text


def test_a_crash_is_answered_with_an_id_and_no_more() -> None:
    answer = _client(RuntimeError("the password is hush")).get("/")

    assert answer.status_code == 500
    assert set(answer.json()) == {"detail", "code"}
    assert "hush" not in answer.text and "Traceback" not in answer.text


def test_a_wrong_statement_is_answered_with_an_id_and_is_not_for_trying_again() -> None:
    answer = _client(errors.StatementFailed("the journal's database refused 'SELECT hat FROM lane'")).get("/")

    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "retry-after" not in answer.headers
    assert "under this id" in answer.json()["detail"] and "lane" not in answer.text


def test_a_statement_that_takes_too_long_is_logged_with_the_path_that_asked_for_it(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    with serve_api(make_database_url("postgres"), statement_timeout_s=0.3) as api, api.http(api.new_key()) as client:
        before = client.get("/sessions")
        with api.stores.database.transaction() as transaction, capture_logs() as told:
            # Whoever reads the table waits.
            transaction.execute("LOCK TABLE session IN ACCESS EXCLUSIVE MODE")
            late = client.get("/sessions")
        after = client.get("/sessions")

    assert (before.status_code, late.status_code, after.status_code) == (200, 503, 200), late.text
    assert late.headers["retry-after"] and "statement" not in late.text
    failed = [line for line in told if line["event"] == "request.failed"]
    assert [line["path"] for line in failed] == ["/api/v1/sessions"]
    assert "QueryCanceled" in failed[0]["error"]
