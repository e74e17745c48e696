"""Tokens that stand for an API key for a short while: JWTs (RFC 7519) that name the key and never hold it."""

from __future__ import annotations

import jwt

from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidToken
from twinkle.server.signing import Signer
from twinkle.storage.tenants.directory import ValidKey

_ALGORITHM = "HS256"
_PURPOSE = "access tokens"
_START = "eyJ"
_SUBJECT = "tml:apikey:"
_MAX_LENGTH = 8192


def is_token(credential: str) -> bool:
    """Whether this is a token rather than a key: every JWT begins with its header's brace, in base64."""
    return credential.startswith(_START)


class Tokens:
    """Issues tokens and judges those that come back. Every API process with the same secret knows them."""

    def __init__(self, signer: Signer, clock: Clock, *, lifetime_s: int) -> None:
        """Prepare.

        Args:
            signer: Has a key for tokens alone: nothing else it signs is one.
            clock: Ends them.
            lifetime_s: How long one stands for its key.
        """
        self._key = signer.key_for(_PURPOSE)
        self._clock = clock
        self._lifetime_s = lifetime_s

    def issue(self, key: ValidKey, *, organization: str) -> str:
        """A token for a key. Whose it is, is told in the SDK's words; nobody has an address here."""
        now = int(self._clock.now())
        claims = {
            "sub": _SUBJECT + key.id,
            "org_id": organization,
            "email": "",
            "iat": now,
            "exp": now + self._lifetime_s,
        }
        return jwt.encode(claims, self._key, _ALGORITHM)

    def key_id_of(self, token: str) -> str:
        """The id of the key it stands for, which may have been revoked since.

        Raises:
            InvalidToken: It was not issued here, or its time is over.
        """
        if len(token) > _MAX_LENGTH:
            raise InvalidToken("not a token of this server")
        # Time is the clock's, and that of another API process may be a little ahead.
        options: jwt.types.Options = {"require": ["sub", "exp"], "verify_exp": False, "verify_iat": False}
        try:
            claims = jwt.decode(token, self._key, algorithms=[_ALGORITHM], options=options)
        except jwt.InvalidTokenError:
            raise InvalidToken("not a token of this server; exchange your API key for one") from None
        if claims["exp"] <= self._clock.now():
            raise InvalidToken("this token has expired; exchange your API key for a new one")
        return str(claims["sub"]).removeprefix(_SUBJECT)
