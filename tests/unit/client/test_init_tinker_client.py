"""``init_tinker_client`` points the official SDK at our server."""

from __future__ import annotations

import os

import pytest

from twinkle_client import init_tinker_client


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_SERVER_URL", "http://elsewhere:1")
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", "tml-elsewhere")

    init_tinker_client(base_url="http://127.0.0.1:9000/", api_key="tml-mine")

    assert os.environ["TINKER_BASE_URL"] == "http://127.0.0.1:9000"
    assert os.environ["TINKER_API_KEY"] == "tml-mine"


def test_the_twinkle_variables_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_SERVER_URL", "http://there:8000")
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", "tml-there")

    init_tinker_client()

    assert (os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"]) == ("http://there:8000", "tml-there")


def test_a_key_the_sdk_would_refuse_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="twinkle keys create"):
        init_tinker_client(api_key="EMPTY_TOKEN")
