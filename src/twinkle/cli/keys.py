"""``twinkle keys``: make and list API keys."""

from __future__ import annotations

import json
from dataclasses import asdict

from twinkle.cli.console import say
from twinkle.cli.journal import opened_journal
from twinkle.cli.table import minute_of, print_table
from twinkle.core.settings import Settings


def create_key(settings: Settings, *, tenant: str, name: str) -> None:
    """Make a key and show it, alone on the last line."""
    with opened_journal(settings) as stores:
        key = stores.tenants.create_key(tenant, name)
    say(f"a key of {tenant}, shown this once and kept as a hash:")
    say(key)


def list_keys(settings: Settings, *, as_json: bool) -> None:
    """Show whose keys there are."""
    with opened_journal(settings) as stores:
        keys = stores.tenants.keys()
    if as_json:
        say(json.dumps([asdict(key) for key in keys]))
        return
    rows = [
        (key.tenant, key.name, minute_of(key.created_at), "" if key.revoked_at is None else minute_of(key.revoked_at))
        for key in keys
    ]
    print_table(("tenant", "name", "made", "revoked"), rows)
