"""``twinkle tenants``: weights and limits of tenants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import print_table
from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError, NotFound
from twinkle.core.job import JobState
from twinkle.core.settings import Settings
from twinkle.storage.tenants.accounting import BYTES_PER_GIGABYTE, Accounting, Stored
from twinkle.storage.tenants.tenants import TenantAccount

_DAY_S = 86_400.0
_SPANS = {"last day": 1, "last 30 days": 30}
_DEFAULT = "default"
_MAX_REASON = 500
_NOTHING = Stored(num_checkpoints=0, size_bytes=0, num_ephemeral=0, ephemeral_bytes=0)


def list_tenants(settings: Settings, *, as_json: bool) -> None:
    """Show each tenant's weight and limits, and what its checkpoints, nameless weights and files take up."""
    with opened_journal(settings) as stores:
        accounts = stores.tenants.all()
        stored_by_tenant = stores.accounting.stored_by_tenant()
        file_bytes = stores.accounting.file_bytes_by_tenant()
    rows = [
        (account, stored_by_tenant.get(account.id, _NOTHING), file_bytes.get(account.id, 0)) for account in accounts
    ]
    if as_json:
        facts = [
            {**asdict(account), "stored": {**_facts(stored), "file_bytes": num_bytes}}
            for account, stored, num_bytes in rows
        ]
        say(json.dumps(facts))
        return
    columns = (
        "tenant",
        "weight",
        "adapters",
        "running",
        "samples",
        "body bytes",
        "jobs",
        "running jobs",
        "tokens/min",
        "stored GB",
        "nameless GB",
        "files GB",
        "files limit",
    )
    print_table(columns, [_row(account, stored, num_bytes) for account, stored, num_bytes in rows])


def show_tenant(settings: Settings, name: str, *, as_json: bool) -> None:
    """Show one tenant's weight and limits, what it has, and what it used in the last day and month.

    Raises:
        NotFound: There is no such tenant.
    """
    now = SystemClock().now()
    with opened_journal(settings) as stores:
        account = next((one for one in stores.tenants.all() if one.name == name), None)
        if account is None:
            raise NotFound(f"no tenant {name!r}; `twinkle tenants list` shows who there is")
        jobs = stores.jobs.num_by_state(account.id)
        held = stores.holdings.of(account.id)
        file_bytes = stores.accounting.file_bytes_by_tenant().get(account.id, 0)
        stored = stores.accounting.stored_by_tenant().get(account.id, _NOTHING)
        usage = {span: _usage(stores.accounting, account.id, now - days * _DAY_S, now) for span, days in _SPANS.items()}
    if as_json:
        has = {**asdict(held), "file_bytes": file_bytes, "ephemeral_bytes": stored.ephemeral_bytes}
        say(json.dumps({**asdict(account), "jobs": jobs, "held": has, "usage": usage}))
        return
    used = {
        "max_jobs": sum(jobs.values()),
        "max_running_jobs": jobs.get(JobState.RUNNING.value, 0),
        "max_files_bytes": file_bytes,
        "max_sessions": held.num_sessions,
        "max_runs": held.num_runs,
        "max_sampling_sessions": held.num_sampling_sessions,
        "max_queued": held.num_open,
        "max_queued_bytes": held.open_bytes,
        "max_checkpoints": held.num_checkpoints,
        "max_checkpoint_bytes": held.checkpoint_bytes,
        "max_kept_bytes": held.kept_bytes,
    }
    rows = [
        (
            limit,
            str(value) if value else "no limit",
            "its own" if limit in account.own_limits else "the settings'",
            str(used[limit]) if limit in used else "",
        )
        for limit, value in asdict(account.limits).items()
    ]
    if account.suspension is not None:
        say(f"suspended: {account.suspension}")
    print_table(("limit", "at most", "whose", "now"), [("weight", f"{account.weight:g}", "its own", ""), *rows])
    gigabytes = [size / BYTES_PER_GIGABYTE for size in (stored.size_bytes, stored.ephemeral_bytes, file_bytes)]
    say("stored now: {:.3f} GB of checkpoints, {:.3f} GB of nameless weights, {:.3f} GB of files\n".format(*gigabytes))
    facts = [(fact, *(f"{of_span[fact]:g}" for of_span in usage.values())) for fact in next(iter(usage.values()))]
    print_table(("used", *usage), facts)


def _usage(accounting: Accounting, tenant: str, start: float, end: float) -> dict[str, float]:
    """What a tenant used between two points in time."""
    work = accounting.work(tenant, start=start, end=end).values()
    stored = accounting.gigabyte_hours(tenant, start=int(start), end=int(end)).values()
    of_files = accounting.file_gigabyte_hours(tenant, start=int(start), end=int(end)).values()
    return {
        "tokens trained": sum(one.num_trained for one in work),
        "tokens of prompts": sum(one.num_prefilled for one in work),
        "tokens sampled": sum(one.num_sampled for one in work),
        "seconds of training": round(sum(one.training_device_s for one in work), 3),
        "seconds of sampling": round(sum(one.sampling_device_s for one in work), 3),
        "checkpoints written": sum(one.num_checkpoints for one in work),
        "gigabyte-hours stored": round(sum(stored) + sum(of_files), 6),
    }


def set_tenant(settings: Settings, name: str, *, weight: float | None, limits: Mapping[str, str | None]) -> None:
    """Change what was given and nothing else; show what there is where nothing was.

    Raises:
        ConfigError: A value is out of range.
        NotFound: There is no such tenant.
    """
    if weight is not None and not 0 < weight <= 1000:
        raise ConfigError(f"--weight must be above 0 and at most 1000, not {weight:g}")
    given = {limit: _number(limit, text) for limit, text in limits.items() if text is not None}
    if weight is None and not given:
        show_tenant(settings, name, as_json=False)
        return
    with opened_journal(settings) as stores:
        stores.tenants.set(name, weight=weight, limits=given)
    say(f"{name}: the API and the workers know within a second")


def suspend_tenant(settings: Settings, name: str, *, reason: str, cancels_samples: bool) -> None:
    """Let a tenant begin nothing new.

    Raises:
        ConfigError: The reason is empty or too long.
        NotFound: There is no such tenant.
    """
    if not 0 < len(reason.strip()) <= _MAX_REASON:
        raise ConfigError(f"--reason must be 1 to {_MAX_REASON} characters; the tenant reads it")
    with opened_journal(settings) as stores:
        tenant = stores.tenants.suspend(name, reason.strip())
        num_cancelled = len(stores.sampling_sessions.cancel_all_of(tenant)) if cancels_samples else 0
        if num_cancelled:
            stores.audit.note(tenant, "samples_cancel", number=str(num_cancelled))
    cancelled = f", {num_cancelled} samples were cancelled" if cancels_samples else ""
    say(f"{name} begins nothing new from within a second on{cancelled}; `twinkle tenants resume {name}` ends that")


def resume_tenant(settings: Settings, name: str) -> None:
    """Let a tenant begin again; raises ``NotFound`` when there is none of that name."""
    with opened_journal(settings) as stores:
        stores.tenants.resume(name)
    say(f"{name} may begin again; its jobs go on by themselves")


def _number(limit: str, text: str) -> int | None:
    if text == _DEFAULT:
        return None
    if not text.isdecimal():
        flag = f"--{limit.replace('_', '-')}"
        raise ConfigError(f"{flag} must be a whole number, 0 for no limit, or {_DEFAULT!r}; not {text!r}")
    return int(text)


def _facts(stored: Stored) -> dict[str, int]:
    return {
        "num_checkpoints": stored.num_checkpoints,
        "size_bytes": stored.size_bytes,
        "num_ephemeral": stored.num_ephemeral,
        "ephemeral_bytes": stored.ephemeral_bytes,
    }


def _row(account: TenantAccount, stored: Stored, file_bytes: int) -> tuple[str, ...]:
    limits = account.limits
    numbers = (
        limits.max_adapters,
        limits.max_running,
        limits.max_samples,
        limits.max_body_bytes,
        limits.max_jobs,
        limits.max_running_jobs,
        limits.tokens_per_minute,
    )
    return (
        account.name,
        f"{account.weight:g}",
        *(str(number) if number else "no limit" for number in numbers),
        f"{stored.size_bytes / BYTES_PER_GIGABYTE:.3f}",
        f"{stored.ephemeral_bytes / BYTES_PER_GIGABYTE:.3f}",
        f"{file_bytes / BYTES_PER_GIGABYTE:.3f}",
        f"{limits.max_files_bytes / BYTES_PER_GIGABYTE:.0f} GB" if limits.max_files_bytes else "no limit",
    )
