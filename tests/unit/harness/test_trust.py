"""Who shares the context that trusts the world's authorities, and who gets one of his own."""

from __future__ import annotations

import ssl

import httpx
import pytest
from httpx._transports import default


def context_of(client: httpx.Client) -> ssl.SSLContext:
    transport = client._transport
    assert isinstance(transport, httpx.HTTPTransport)
    context = transport._pool._ssl_context
    assert isinstance(context, ssl.SSLContext)
    return context


def test_all_clients_share_the_trust_in_the_worlds_authorities() -> None:
    with httpx.Client() as one, httpx.Client() as other:
        assert context_of(one) is context_of(other)
        assert context_of(one).verify_mode == ssl.CERT_REQUIRED


def test_whoever_trusts_somebody_else_or_nobody_has_a_context_of_his_own() -> None:
    own = ssl.create_default_context()
    with httpx.Client() as one, httpx.Client(verify=own) as other, httpx.Client(verify=False) as nobody:
        assert context_of(other) is own
        assert context_of(nobody) is not context_of(one)
        assert context_of(nobody).verify_mode == ssl.CERT_NONE
    assert default.create_ssl_context(verify=False).verify_mode == ssl.CERT_NONE


def test_another_file_of_authorities_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with httpx.Client() as before:
        monkeypatch.setenv("SSL_CERT_FILE", str(httpx.__file__))
        with pytest.raises(ssl.SSLError):
            httpx.Client()
        monkeypatch.undo()
        with httpx.Client() as after:
            assert context_of(after) is context_of(before)
