"""Who calls: API keys, and the tokens that stand for one of them for a short while.

Tokens are JWTs (RFC 7519), which name the key and never hold it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jwt
import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidToken, StorageUnavailable, Unauthenticated
from twinkle.core.ids import API_KEY_PREFIX
from twinkle.server.access.signing import Signer
from twinkle.server.threads import Shared, Threads
from twinkle.storage.tenants.keyring import digest_of_key
from twinkle.storage.tenants.tenants import Tenants, ValidKey

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
        ends_at = claims["exp"]
        if not isinstance(ends_at, int | float) or not math.isfinite(ends_at):
            raise InvalidToken("not a token of this server; exchange your API key for one")
        if ends_at <= self._clock.now():
            raise InvalidToken("this token has expired; exchange your API key for a new one")
        return str(claims["sub"]).removeprefix(_SUBJECT)


_HIT_TTL_S = 30.0
_MISS_TTL_S = 2.0
_HEARD_TTL_S = 1.0
_CLOCKS_DIFFER_S = 30.0
# While the database is away a key that was right goes on being right for this long.
_STALE_TTL_S = 600.0
_MAX_KEY_LENGTH = 512
_MAX_REMEMBERED = 20_000

_log = structlog.get_logger()


@dataclass(frozen=True)
class _Remembered:
    key: ValidKey | None
    looked_at: float

    def is_fresh(self, now: float) -> bool:
        return now - self.looked_at < (_HIT_TTL_S if self.key else _MISS_TTL_S)


class Keys:
    """Opens accounts. A key that is revoked, wherever, ends within a second, and its tokens with it.

    What is known is half a minute old at most; what was revoked since is asked once a second, for all keys together.
    """

    def __init__(
        self, tenants: Tenants, clock: Clock, threads: Threads, tokens: Tokens, *, takes_any: bool = False
    ) -> None:
        self._tenants = tenants
        self._clock = clock
        self._threads = threads
        self._tokens = tokens
        self.takes_any = takes_any
        """Whether whatever comes opens a tenant of its own (:mod:`twinkle.server.access.any_key`)."""
        # By a key's digest or, for what tokens name, its id.
        self._remembered: dict[str, _Remembered] = {}
        self._lookups = Shared[ValidKey | None]()
        self._heard_at = 0.0
        self._hearing: asyncio.Task[None] | None = None

    async def key_of(self, credential: str | None) -> ValidKey:
        """The key that this is, or that this token stands for.

        Raises:
            Unauthenticated: The key is missing, malformed or unknown.
            InvalidToken: The token has expired or is not ours, or its key is unknown by now.
        """
        if self.takes_any:
            return await self._own_or_any(credential or "")
        if not credential:
            raise Unauthenticated("send an API key in the X-API-Key header")
        if is_token(credential):
            key_id = self._tokens.key_id_of(credential)
            key = await self._known(key_id, partial(self._tenants.key_with_id, key_id))
            if key is None:
                raise InvalidToken("the API key that this token was exchanged for was revoked")
            return key
        if not credential.startswith(API_KEY_PREFIX) or len(credential) > _MAX_KEY_LENGTH:
            raise Unauthenticated(f"not an API key of this server: its keys start with {API_KEY_PREFIX}")
        key = await self._known(digest_of_key(credential), partial(self._tenants.key, credential))
        if key is None:
            raise Unauthenticated("unknown API key")
        return key

    async def _own_or_any(self, credential: str) -> ValidKey:
        """The key that this is, else the one that stands for all who come with this text."""
        if len(credential) > _MAX_KEY_LENGTH or "\x00" in credential:
            raise Unauthenticated(f"a key has at most {_MAX_KEY_LENGTH} characters, and no NUL")
        key = await self._known(digest_of_key(credential), partial(self._tenants.key, credential))
        if key is None:
            key = await self._known(f"any:{digest_of_key(credential)}", partial(self._tenants.any_key, credential))
        if key is None:
            raise Unauthenticated("this key was revoked")
        return key

    def forget(self, key: ValidKey) -> None:
        """Ask about a key again: it was revoked just now."""
        self._remembered = {
            name: known for name, known in self._remembered.items() if known.key is None or known.key.id != key.id
        }

    async def _known(self, name: str, look_up: Callable[[], ValidKey | None]) -> ValidKey | None:
        """What is remembered under a name, else one query however many requests bring the same at once."""
        now = self._clock.now()
        if now - self._heard_at >= _HEARD_TTL_S:
            await self._hear_of_ends(now)
            now = self._clock.now()
        remembered = self._remembered.get(name)
        if remembered is not None and remembered.is_fresh(now):
            return remembered.key
        return await self._lookups.get(name, partial(self._ask, name, look_up))

    async def _hear_of_ends(self, now: float) -> None:
        """Forget the keys that were revoked since this was last asked."""
        if self._hearing is None or self._hearing.done():
            self._hearing = asyncio.create_task(self._forget_ended(now))
        await asyncio.shield(self._hearing)

    async def _forget_ended(self, now: float) -> None:
        try:
            ended = set(await self._threads.run(self._tenants.ended_since, now - _HIT_TTL_S - _CLOCKS_DIFFER_S))
        except StorageUnavailable as error:
            _log.warning("auth.deaf", error=error.message, next="a key that was revoked just now goes on for a while")
            ended = set()
        self._heard_at = now
        self._remembered = {
            name: known for name, known in self._remembered.items() if known.key is None or known.key.id not in ended
        }

    async def _ask(self, name: str, look_up: Callable[[], ValidKey | None]) -> ValidKey | None:
        now = self._clock.now()
        try:
            key = await self._threads.run(look_up)
        except StorageUnavailable as error:
            known = self._remembered.get(name)
            if known is None or known.key is None or now - known.looked_at > _STALE_TTL_S:
                raise
            _log.warning("auth.stale", error=error.message, next="the last known answer holds for now")
            return known.key
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered = {n: known for n, known in self._remembered.items() if known.is_fresh(now)}
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
        self._remembered[name] = _Remembered(key, now)
        return key
