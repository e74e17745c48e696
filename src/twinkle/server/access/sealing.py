"""Tenants' secrets on their way through the database: readable with the deployment's own secret alone.

A job may need a token of its owner's long after the request that brought it. It is kept sealed, in its place in the
job's spec (AES-SIV, RFC 5297): the same secret of the same tenant is sealed the same, so that a resent request is known
again. Answers leave it out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from pydantic import SecretStr

from twinkle.core.errors import InvalidInput
from twinkle.server.access.signing import Signer

SECRET_FIELDS = frozenset({"hub_token", "secret_access_key", "session_token"})
"""Fields of specs whose values are secrets, however deep they stand."""
SEALED = "sealed:"
SHOWN = "(kept secret)"
_PURPOSE = "job secrets"


class Sealer:
    """Seals the secrets of specs, and opens them for whoever runs the job."""

    def __init__(self, signer: Signer) -> None:
        self._cipher = AESSIV(hashlib.sha512(signer.key_for(_PURPOSE)).digest())

    def sealed(self, spec: Mapping[str, Any], tenant: str) -> dict[str, Any]:
        """A spec with its secrets sealed; what was sealed for this tenant stays as it is."""
        return _with_secrets(spec, lambda text: text if self._is_sealed(text, tenant) else self._seal(text, tenant))

    def open(self, text: str, tenant: str) -> SecretStr:
        """What was sealed.

        Raises:
            InvalidInput: It was not, or with another secret of the deployment, or for another tenant.
        """
        try:
            data = base64.urlsafe_b64decode(text.removeprefix(SEALED))
            return SecretStr(self._cipher.decrypt(data, [tenant.encode()]).decode())
        except (InvalidTag, binascii.Error, ValueError) as error:
            raise InvalidInput(
                "spec", "a secret in it cannot be read any more: this server's own secret has changed; submit it again"
            ) from error

    def _seal(self, text: str, tenant: str) -> str:
        sealed = self._cipher.encrypt(text.encode(), [tenant.encode()])
        return SEALED + base64.urlsafe_b64encode(sealed).decode()

    def _is_sealed(self, text: str, tenant: str) -> bool:
        if not text.startswith(SEALED):
            return False
        try:
            self.open(text, tenant)
        except InvalidInput:
            return False
        return True


def shown(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec as it is told: without its secrets."""
    return _with_secrets(spec, lambda _: SHOWN)


def _with_secrets(value: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    return {
        key: change(item) if key in SECRET_FIELDS and isinstance(item, str) else _within(item, change)
        for key, item in value.items()
    }


def _within(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return _with_secrets(value, change)
    if isinstance(value, list):
        return [_within(item, change) for item in value]
    return value
