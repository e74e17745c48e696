"""Errors over HTTP: the status, the one form, and nothing of the server's insides."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from twinkle.core import errors
from twinkle.server.errors import install_error_answers


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
