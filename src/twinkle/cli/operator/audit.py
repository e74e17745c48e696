"""``twinkle audit``: who did what, of all tenants and of the service, straight from the journal."""

from __future__ import annotations

import json
from dataclasses import asdict

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import minute_of, print_table
from twinkle.core.clock import SystemClock
from twinkle.core.errors import NotFound
from twinkle.core.settings import Settings

_DAY_S = 86_400.0


def show_audit(
    settings: Settings,
    *,
    tenant: str | None,
    event: str | None,
    actor: str | None,
    days: float,
    limit: int,
    as_json: bool,
) -> None:
    """Print the latest entries that fit, the oldest of them first.

    Raises:
        NotFound: There is no such tenant.
    """
    now = SystemClock().now()
    with opened_journal(settings) as stores:
        tenant_id = None if tenant is None else _id_of(tenant, {one.name: one.id for one in stores.tenants.all()})
        found = stores.audit.entries(
            tenant_id, start=now - days * _DAY_S, end=now + 1, limit=limit if event is None and actor is None else None
        )
    fitting = [one for one in found if one.event.startswith(event or "") and (actor or "") in one.actor][-limit:]
    if as_json:
        say(json.dumps([asdict(one) for one in fitting]))
        return
    rows = [
        (
            minute_of(one.at),
            one.tenant or "",
            one.actor,
            one.event,
            ", ".join(f"{k}={v}" for k, v in one.details.items()),
        )
        for one in fitting
    ]
    print_table(("at", "whose", "by", "what", "of which"), rows)


def _id_of(tenant: str, ids: dict[str, str]) -> str:
    if tenant not in ids:
        raise NotFound(f"no tenant {tenant!r}; `twinkle tenants list` shows who there is")
    return ids[tenant]
