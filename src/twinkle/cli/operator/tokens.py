"""``twinkle tokens``: weights access tokens of every tenant, straight in the journal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import minute_of, print_table
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.storage.checkpoints.access_tokens import AccessToken, AccessTokens

_SCHEME = "tinker://"
_DAY_S = 86_400.0


def create_token(settings: Settings, target: str, *, name: str, days: float) -> None:
    """Make a token for a run or for one checkpoint, and show it, alone on the last line.

    Raises:
        ConfigError: It would have no time.
        NotFound: There is no such run or checkpoint.
    """
    if not days > 0:
        raise ConfigError(f"--days must be above 0, not {days:g}")
    with _opened(settings) as tokens:
        issue = tokens.issue_for_checkpoint if target.startswith(_SCHEME) else tokens.issue_for_run
        issued = issue(target, tenant=None, name=name, ttl_s=days * _DAY_S)
    token = issued.token
    what = token.path or f"every checkpoint of {token.run}"
    say(f"{token.id}, until {minute_of(token.expires_at)}, opens {what}; shown this once and kept as a hash:")
    say(issued.secret)


def list_tokens(settings: Settings, *, run: str | None, as_json: bool) -> None:
    """Show the tokens whose time is not over."""
    with _opened(settings) as tokens:
        found = tokens.all(tenant=None, run=run)
    if as_json:
        say(json.dumps([asdict(token) for token in found]))
        return
    print_table(("token", "tenant", "opens", "name", "until", "last used", "revoked"), [_row(one) for one in found])


def revoke_token(settings: Settings, token_id: str) -> None:
    """Let a token open nothing any more.

    Raises:
        NotFound: There is no such token.
    """
    with _opened(settings) as tokens:
        tokens.revoke(token_id, tenant=None)
    say(f"{token_id} opens nothing any more; what was accepted with it goes on")


@contextmanager
def _opened(settings: Settings) -> Iterator[AccessTokens]:
    with opened_journal(settings) as stores:
        yield stores.access_tokens


def _row(token: AccessToken) -> tuple[str, ...]:
    moments = (token.expires_at, token.last_used_at, token.revoked_at)
    return (
        token.id,
        token.owner,
        token.path or token.run,
        token.name,
        *("" if moment is None else minute_of(moment) for moment in moments),
    )
