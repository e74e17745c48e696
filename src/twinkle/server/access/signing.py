"""The one place that signs: whatever this server hands out to be brought back is under a key made for its purpose.

The deployment's secret itself signs nothing. Keys are derived from it (HMAC of the purpose), so nothing that was signed
for one purpose passes for another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import TypeAlias

import structlog

from twinkle.core.errors import InvalidInput
from twinkle.core.places import PlaceInList
from twinkle.core.settings import Settings

Part: TypeAlias = str | int | float

_CURSORS = "cursors"
_SECRET_FILE = "download-url-secret"
_SECRET_BYTES = 32

_log = structlog.get_logger()


class Signer:
    """Signs lists of texts and numbers. Every API process with the same secret knows the signatures of the others."""

    def __init__(self, secret: bytes) -> None:
        """Prepare.

        Args:
            secret: The deployment's: whoever knows it can make signatures.
        """
        self._secret = secret

    def key_for(self, purpose: str) -> bytes:
        """The key of a purpose, for what signs by itself."""
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).digest()

    def sign(self, purpose: str, *parts: Part) -> str:
        """The signature of some parts in their order."""
        return hmac.new(self.key_for(purpose), json.dumps(parts).encode(), hashlib.sha256).hexdigest()

    def is_signed(self, purpose: str, *parts: Part, signature: str) -> bool:
        """Whether the signature is that of these parts; how long it takes does not depend on what is wrong."""
        return hmac.compare_digest(self.sign(purpose, *parts).encode(), signature.encode("utf-8", "surrogatepass"))


def hook_key(signer: Signer, tenant: str) -> bytes:
    """What a tenant's webhooks are signed with."""
    return signer.key_for(f"webhooks of {tenant}")


class Cursors:
    """Places in listings, as texts that tell nothing and are good for the tenant and the listing they were given to."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def write(self, tenant: str, listing: str, created_at: float, item: str) -> str:
        """The cursor of a place: that of an item by its id, behind which the listing goes on."""
        data = base64.urlsafe_b64encode(json.dumps([created_at, item]).encode()).decode()
        return f"{data}.{self._signer.sign(_CURSORS, tenant, listing, data)}"

    def read(self, tenant: str, listing: str, cursor: str) -> PlaceInList:
        """The place of a cursor.

        Raises:
            InvalidInput: It is not one that this tenant was given by this listing: another tenant's, one that was
                tampered with or cut short, and one that never was, are all answered alike.
        """
        data, _, signature = cursor.rpartition(".")
        if self._signer.is_signed(_CURSORS, tenant, listing, data, signature=signature):
            try:
                created_at, item = json.loads(base64.urlsafe_b64decode(data))
                return PlaceInList(created_at=float(created_at), id=str(item))
            except (binascii.Error, ValueError) as error:
                raise AssertionError("what was signed here can be read") from error
        raise InvalidInput("cursor", "is not one that this listing has given you; begin without one")


def secret_of(settings: Settings) -> bytes:
    """The secret of the settings, else one kept in the home folder for its owner's eyes only. Blocks."""
    given = settings.download_url_secret.get_secret_value()
    if given:
        return given.encode()
    path = settings.home.absolute() / _SECRET_FILE
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(path, secrets.token_urlsafe(_SECRET_BYTES))
        return path.read_bytes()
    except OSError as error:
        _log.warning(
            "downloads.secret_not_kept",
            error=error.strerror,
            next="download URLs, cursors and tokens end with this process; set TWINKLE_DOWNLOAD_URL_SECRET",
        )
        return secrets.token_bytes(_SECRET_BYTES)


def _create(path: Path, text: str) -> None:
    """Write the file unless it exists: complete from the first moment on, and never readable by others."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.link(fresh, path)
    except FileExistsError:
        return
    finally:
        fresh.unlink()
