"""``twinkle keys``: make, list, look at, rotate and revoke API keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import minute_of, print_table
from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError
from twinkle.core.scopes import ALL_SCOPES, read_scopes
from twinkle.core.settings import Settings
from twinkle.storage.tenants.keyring import KeyInfo

_DAY_S = 86_400.0
_HOUR_S = 3600.0
_SHOWN_ID = 12
_MAX_NAME = 200


def create_key(settings: Settings, *, tenant: str, name: str, scopes: str | None, days: float | None) -> None:
    """Make a key and show it, alone on the last line.

    Raises:
        ConfigError: A name is empty, or no name.
        InvalidInput: A scope is none.
    """
    for flag, text in (("--tenant", tenant), ("--name", name)):
        if not text.strip() or len(text) > _MAX_NAME or not text.isprintable() or text.startswith("-"):
            raise ConfigError(
                f"{flag} must be 1 to {_MAX_NAME} characters that can be printed, and not begin with '-'; not {text!r}"
            )
    allowed = ALL_SCOPES if scopes is None else read_scopes([word.strip() for word in scopes.split(",")])
    ends_at = None if days is None else SystemClock().now() + days * _DAY_S
    with opened_journal(settings, creates=True) as stores:
        key = stores.tenants.create_key(tenant, name, scopes=allowed, expires_at=ends_at)
    say(f"a key of {tenant}, shown this once and kept as a hash:")
    say(key)


def list_keys(settings: Settings, *, tenant: str | None, as_json: bool) -> None:
    """Show whose keys there are."""
    with opened_journal(settings) as stores:
        keys = stores.keyring.all(tenant=tenant)
    if as_json:
        say(json.dumps([asdict(key) for key in keys]))
        return
    rows = [
        (
            key.id[:_SHOWN_ID],
            key.tenant,
            key.name,
            _words(key.scopes),
            minute_of(key.created_at),
            _minute(key.last_used_at, "never"),
            _end_of(key),
        )
        for key in keys
    ]
    print_table(("id", "tenant", "name", "may", "made", "last used", "ends"), rows)


def show_key(settings: Settings, key_id: str, *, as_json: bool) -> None:
    """Show one key; raises ``NotFound`` and ``Conflict`` as :meth:`twinkle.storage.tenants.keyring.Keyring.find`."""
    with opened_journal(settings) as stores:
        key = stores.keyring.find(key_id)
    if as_json:
        say(json.dumps(asdict(key)))
        return
    rows = [
        ("id", key.id),
        ("tenant", key.tenant),
        ("name", key.name),
        ("may", _words(key.scopes)),
        ("made", minute_of(key.created_at)),
        ("last used", _minute(key.last_used_at, "never")),
        ("ends", _end_of(key)),
    ]
    print_table(("", ""), rows)


def revoke_key(settings: Settings, key_id: str) -> None:
    """End a key; raises as :func:`show_key` does."""
    with opened_journal(settings) as stores:
        key = stores.keyring.revoke(key_id)
    say(f"key {key.id[:_SHOWN_ID]} ({key.name}) of {key.tenant} opens nothing any more; the API knows within a second")


def rotate_key(settings: Settings, key_id: str, *, grace_hours: float) -> None:
    """Replace a key by one like it, which is shown alone on the last line; raises as :func:`show_key` does."""
    with opened_journal(settings) as stores:
        key, secret = stores.keyring.rotate(key_id, grace_s=grace_hours * _HOUR_S)
    old_one = "has ended" if grace_hours <= 0 else f"ends in {grace_hours:g} hours"
    say(f"a key of {key.tenant} in place of {key_id[:_SHOWN_ID]}, which {old_one}; shown this once and kept as a hash:")
    say(secret)


def _words(scopes: Sequence[str]) -> str:
    return "everything" if frozenset(scopes) == ALL_SCOPES else ", ".join(scopes)


def _minute(moment: float | None, otherwise: str) -> str:
    return otherwise if moment is None else minute_of(moment)


def _end_of(key: KeyInfo) -> str:
    if key.revoked_at is not None:
        return f"revoked {minute_of(key.revoked_at)}"
    return _minute(key.expires_at, "")
