"""``twinkle ops``: operations of all tenants, straight from the journal: which wait or failed, why, and to end one."""

from __future__ import annotations

import json
from dataclasses import asdict

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.cli.table import minute_of, print_table
from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError
from twinkle.core.operation import OperationKind, OperationState
from twinkle.core.settings import Settings
from twinkle.scheduler.standing import describe, line_up, standing_of
from twinkle.storage.journal.operations import OperationInfo
from twinkle.storage.stores import Stores

_WORDS = {
    "waiting": OperationState.QUEUED,
    "running": OperationState.RUNNING,
    "failed": OperationState.FAILED,
    "done": OperationState.DONE,
}
_SHOWN_MESSAGE = 80
_MAX_REASON = 500


def list_operations(
    settings: Settings, *, states: str, tenant: str | None, mesh: str | None, limit: int, as_json: bool
) -> None:
    """Print the operations in some states, the oldest that wait first.

    Raises:
        ConfigError: A state is none.
    """
    wanted = {_state_of(word.strip()) for word in states.split(",")}
    with opened_journal(settings) as stores:
        found = stores.operations.page(wanted, tenant=tenant, mesh=mesh, limit=limit)
    if as_json:
        say(json.dumps([asdict(one) for one in found]))
        return
    now = SystemClock().now()
    columns = ("operation", "tenant", "mesh", "kind", "state", "attempts", "tokens", "since", "message")
    print_table(columns, [_row(one, now) for one in found])


def show_operation(settings: Settings, request_id: str, *, as_json: bool) -> None:
    """Print all that is known of an operation but its data; raises ``NotFound`` where there is none."""
    with opened_journal(settings) as stores:
        found = stores.operations.find(request_id)
        why = _why(stores, found, settings)
    if as_json:
        say(json.dumps({**asdict(found), "why": why}))
        return
    rows = [
        ("operation", found.request_id),
        ("tenant", found.tenant),
        ("run or session", f"{found.lane}, number {found.seq}"),
        ("mesh", found.mesh),
        ("kind", found.kind.value),
        ("state", found.state.value + (", ends as cancelled in its turn" if found.is_cancelled else "")),
        ("attempts", f"{found.attempts}, at {found.suspicions} its worker died or the device failed"),
        ("size", f"{found.num_tokens} tokens, {found.payload_bytes} bytes"),
        ("accepted", minute_of(found.accepted_at)),
        ("begun", "" if found.started_at is None else minute_of(found.started_at)),
        (
            "ended",
            "" if found.finished_at is None else f"{minute_of(found.finished_at)}, {found.device_s:.2f} s of device",
        ),
        ("message", found.message or ""),
        ("why it is where it is", why),
    ]
    print_table(("", ""), rows)


def say_why(settings: Settings, request_id: str) -> None:
    """Say in a sentence why an operation is where it is; raises ``NotFound`` where there is none."""
    with opened_journal(settings) as stores:
        say(_why(stores, stores.operations.find(request_id), settings))


def cancel_operation(settings: Settings, request_id: str, *, reason: str) -> None:
    """Let an operation that waits end as cancelled; a sample ends at once, whether it waits or runs.

    Raises:
        ConfigError: The reason is empty or too long.
        NotFound: There is none of that id.
        Conflict: It cannot be cancelled any more, or begins a run.
    """
    if not 0 < len(reason.strip()) <= _MAX_REASON:
        raise ConfigError(f"--reason must be 1 to {_MAX_REASON} characters; the tenant reads it")
    with opened_journal(settings) as stores:
        found = stores.operations.find(request_id)
        if found.kind is OperationKind.SAMPLE:
            ended = stores.sampling_sessions.cancel(request_id, found.tenant_id)
            say(f"{request_id} {'was cancelled' if ended else 'had ended already'}")
            return
        stores.operations.cancel(request_id, reason=reason.strip())
    say(
        f"{request_id} ends as cancelled in its turn; the run goes on behind it, an open window of gradients is dropped"
    )


def _why(stores: Stores, found: OperationInfo, settings: Settings) -> str:
    if found.state.is_final:
        return f"it has ended: {found.message or found.state.value}"
    now = SystemClock().now()
    meshes = {mesh.name: mesh for mesh in stores.meshes.all()}
    mesh = meshes.get(found.mesh)
    standing = standing_of(
        stores.queues.place(found.request_id, found.tenant_id),
        line_up(stores.queues.look(found.mesh)),
        is_mesh_alive=mesh is not None and mesh.alive,
        now=now,
        max_attempts=settings.max_attempts,
    )
    return describe(standing, now=now)


def _state_of(word: str) -> OperationState:
    if word not in _WORDS:
        raise ConfigError(f"--state must be some of {', '.join(_WORDS)}; not {word!r}")
    return _WORDS[word]


def _row(one: OperationInfo, now: float) -> tuple[str, ...]:
    since = one.finished_at or one.started_at or one.accepted_at
    word = next(word for word, state in _WORDS.items() if state is one.state)
    message = one.message or ""
    return (
        one.request_id,
        one.tenant,
        one.mesh,
        one.kind.value,
        "cancelled, waits" if one.is_cancelled and not one.state.is_final else word,
        str(one.attempts),
        str(one.num_tokens),
        f"{now - since:.0f} s",
        message if len(message) <= _SHOWN_MESSAGE else message[: _SHOWN_MESSAGE - 1] + "…",
    )
