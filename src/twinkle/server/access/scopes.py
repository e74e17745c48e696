"""Which part of a tenant's rights a request needs: by its method and path, whichever route answers it.

Looked up only for keys that may not do everything, for tenants that are suspended and on disks with little room, so it
costs nobody else anything.
A route that is in no line of the table fails a test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from twinkle.core.errors import DiskFull, Forbidden
from twinkle.core.scopes import ALL_SCOPES, Scope
from twinkle.storage.disks import Disks

READING = frozenset({"GET", "HEAD", "OPTIONS"})
_ANY = frozenset({Scope.READ})
_SAMPLE = frozenset({Scope.SAMPLE, Scope.TRAIN})
_TRAIN = frozenset({Scope.TRAIN})


@dataclass(frozen=True)
class Need:
    """What a request needs: one of ``scopes``. Whoever is suspended may still do what ``ends`` something, or reads."""

    scopes: frozenset[Scope]
    ends: bool = False


_READ_ALL = Need(_ANY)
_KEEPS_ALIVE = re.compile(r"/(session_heartbeat|telemetry)\Z")

_TABLE: tuple[tuple[frozenset[str], re.Pattern[str], Need], ...] = tuple(
    (frozenset(methods.split()), re.compile(pattern + r"\Z"), need)
    for methods, pattern, need in (
        # Collecting, keeping alive, ending: whoever may look may do this too.
        ("POST", r"/api/v1/(retrieve_futures?|session_heartbeat|telemetry|get_info|weights_info)", _READ_ALL),
        ("POST", r"/api/v1/(client/(dynamic_)?config|auth/token|sessions/search)", _READ_ALL),
        ("POST", r"/api/v1/sessions/[^/]+/finish", Need(_ANY, ends=True)),
        ("POST", r"/api/native/v1/(futures/collect|count_tokens)", _READ_ALL),
        ("POST", r"/api/v1/twinkle/(session_heartbeat|weights_info)", _READ_ALL),
        ("DELETE", r"/api/v1/auth/apikey/me", Need(_ANY, ends=True)),
        # Sampling, and what it takes.
        ("POST", r"/api/v1/(create_session|create_sampling_session|join_sampling_session|asample)", Need(_SAMPLE)),
        ("POST", r"/api/v1/cancel_future", Need(_SAMPLE, ends=True)),
        ("POST", r"/api/native/v1/sessions/[^/]+/cancel_samples", Need(_SAMPLE, ends=True)),
        ("POST", r"(/api)?/v1/(chat/completions|completions|batches|files|uploads)", Need(_SAMPLE)),
        ("POST", r"/api/v1/twinkle/create_session", Need(_SAMPLE)),
        ("POST", r"/api/v1/sampler/.+/twinkle/[^/]+", Need(_SAMPLE)),
        ("POST", r"/api/v1/processor/twinkle/(create|call)", Need(_SAMPLE)),
        ("DELETE", r"/api/v1/processor/twinkle/[^/]+", Need(_SAMPLE, ends=True)),
        ("POST", r"/v1/uploads/[^/]+/(parts|complete)", Need(_SAMPLE)),
        ("POST", r"/v1/(batches|uploads)/[^/]+/cancel", Need(_SAMPLE, ends=True)),
        ("DELETE", r"/v1/files/[^/]+", Need(_SAMPLE, ends=True)),
        ("POST", r"/api/native/v1/uploads(/[^/]+/complete)?", Need(_SAMPLE)),
        ("PUT", r"/api/native/v1/uploads/[^/]+/parts/[^/]+", Need(_SAMPLE)),
        ("DELETE", r"/api/native/v1/files/[^/]+", Need(_SAMPLE, ends=True)),
        ("POST", r"/v1/fine_tuning/alpha/graders/(run|validate)", Need(_SAMPLE)),
        # With it anybody could speak in our name to the tenant's webhooks. Who is suspended may go on checking them.
        ("GET HEAD", r"/api/native/v1/jobs/webhook_secret", Need(_TRAIN, ends=True)),
        # All that makes or changes runs, checkpoints and jobs.
        ("POST", r"/api/v1/(create_model|create_custom_loss|optim_step|load_weights)", Need(_TRAIN)),
        ("POST", r"/api/v1/forward(_backward)?", Need(_TRAIN)),
        ("POST", r"/api/v1/(save_weights(_external|_for_sampler)?|copy_weights)", Need(_TRAIN)),
        ("POST", r"/api/v1/unload_model", Need(_TRAIN, ends=True)),
        ("PUT", r"/api/v1/sessions/[^/]+/project", Need(_TRAIN)),
        ("POST", r"/api/v1/training_runs/.+/publish", Need(_TRAIN)),
        ("PUT", r"/api/v1/training_runs/.+/ttl", Need(_TRAIN)),
        ("DELETE", r"/api/v1/training_runs/.+", Need(_TRAIN, ends=True)),
        ("POST", r"/api/native/v1/access_tokens", Need(_TRAIN)),
        ("DELETE", r"/api/native/v1/access_tokens/[^/]+", Need(_TRAIN, ends=True)),
        ("POST", r"/api/native/v1/runs/[^/]+/(fork|rewind)", Need(_TRAIN)),
        ("POST", r"/api/native/v1/jobs(/many|/[^/]+/(resume|retry))?", Need(_TRAIN)),
        ("POST", r"/api/native/v1/jobs/[^/]+/(cancel|pause)", Need(_TRAIN, ends=True)),
        ("POST", r"/v1/fine_tuning/jobs(/[^/]+/resume)?", Need(_TRAIN)),
        ("POST", r"/v1/fine_tuning/jobs/[^/]+/(cancel|pause)", Need(_TRAIN, ends=True)),
        ("DELETE", r"(/api)?/v1/models/.+", Need(_TRAIN, ends=True)),
        ("POST", r"/api/v1/model/.+/twinkle/remove_adapter", Need(_TRAIN, ends=True)),
        ("POST", r"/api/v1/model/.+/twinkle/[^/]+", Need(_TRAIN)),
        ("DELETE", r"/api/v1/twinkle/training_runs/.+", Need(_TRAIN, ends=True)),
        ("POST", r"/api/v1/twinkle/pushes", Need(_TRAIN)),
        ("DELETE", r"/api/v1/twinkle/pushes/[^/]+", Need(_TRAIN, ends=True)),
    )
)


def need_of(method: str, path: str) -> Need | None:
    """What a request needs; ``None`` where no line of the table says, which is refused to all but full keys."""
    otherwise = _READ_ALL if method in READING else None
    return next((need for methods, pattern, need in _TABLE if method in methods and pattern.match(path)), otherwise)


def may_go_on(method: str, path: str) -> bool:
    """Whether a request begins nothing: it reads, collects, keeps alive or ends."""
    need = need_of(method, path)
    return need is not None and (need.ends or Scope.READ in need.scopes)


def only_ends_or_reads(method: str, path: str) -> bool:
    """Whether a request deletes something, or only reads: of those that begin nothing, not what keeps alive."""
    need = need_of(method, path)
    return need is not None and (need.ends or (Scope.READ in need.scopes and _KEEPS_ALIVE.search(path) is None))


def refuse_beyond_scopes(scopes: frozenset[Scope], method: str, path: str) -> None:
    """Raise ``Forbidden`` where a key may not do what is asked."""
    if scopes == ALL_SCOPES:
        return
    need = need_of(method, path)
    if need is None or not scopes & need.scopes:
        words = " and ".join(sorted(scopes))
        raise Forbidden(f"this key may {words} and nothing else; use a key of the same tenant that may do this")


def refuse_suspended(reason: str, method: str, path: str) -> None:
    """Raise ``Forbidden`` where a suspended tenant would begin something."""
    if not may_go_on(method, path):
        raise Forbidden(
            f"the operator has suspended this tenant: {reason}. What was accepted goes on, and everything can be read"
            " and deleted; nothing new is begun"
        )


def check_room(disks: Disks, method: str, path: str) -> None:
    """Let a request pass that there is room for.

    Raises:
        DiskFull: There is none.
    """
    if not disks.is_low:
        return
    if disks.is_critical and not only_ends_or_reads(method, path):
        raise DiskFull("the server has no room left on its disk; only reading and deleting go on until it has")
    if not may_go_on(method, path):
        raise DiskFull(
            "the server has little room left on its disk; what was accepted goes on, and nothing new is begun:"
            " delete what you need no longer, or send this again later"
        )
