"""``twinkle keys``: make and list API keys."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime

from twinkle.cli.console import say
from twinkle.cli.journal import opened_journal
from twinkle.cli.table import print_table
from twinkle.core.clock import SystemClock
from twinkle.core.settings import Settings
from twinkle.storage.tenants.directory import Directory


def create_key(settings: Settings, *, tenant: str, name: str) -> None:
    """Make a key and show it, alone on the last line."""
    with opened_journal(settings) as engine:
        key = Directory(engine, SystemClock()).create_key(tenant, name)
    say(f"a key of {tenant}, shown this once and kept as a hash:")
    say(key)


def list_keys(settings: Settings, *, as_json: bool) -> None:
    """Show whose keys there are."""
    with opened_journal(settings) as engine:
        keys = Directory(engine, SystemClock()).keys()
    if as_json:
        say(json.dumps([asdict(key) for key in keys]))
        return
    rows = [
        (key.tenant, key.name, _date(key.created_at), "" if key.revoked_at is None else _date(key.revoked_at))
        for key in keys
    ]
    print_table(("tenant", "name", "made", "revoked"), rows)


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
