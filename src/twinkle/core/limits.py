"""What a tenant may use. The settings give the limits of everybody, a tenant's row those of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """One tenant's limits; 0 is none.

    ``max_adapters`` counts those of live sessions, ``max_running`` the operations, and sequences of samples, that run
    at once on one mesh, ``max_samples`` those that wait or run, ``max_body_bytes`` the request bodies and results that
    the API holds of the tenant, ``max_files_bytes`` what its files, unfinished uploads and prepared rows take up,
    ``max_jobs`` the jobs that have not ended, ``max_running_jobs`` those among them that run at once. ``max_sessions``,
    ``max_runs`` and ``max_sampling_sessions`` count what is kept of them, ``max_queued`` and ``max_queued_bytes`` the
    operations that wait or run and what they were sent with, ``max_checkpoints`` and ``max_checkpoint_bytes`` those
    that have not expired, ``max_kept_bytes`` what is kept so that runs can be rebuilt, and of samples as long as their
    results: recovery points and payloads.
    """

    max_adapters: int = 0
    max_running: int = 0
    max_samples: int = 0
    max_body_bytes: int = 0
    max_files_bytes: int = 0
    max_jobs: int = 0
    max_running_jobs: int = 0
    tokens_per_minute: int = 0
    max_sessions: int = 0
    max_runs: int = 0
    max_sampling_sessions: int = 0
    max_queued: int = 0
    max_queued_bytes: int = 0
    max_checkpoints: int = 0
    max_checkpoint_bytes: int = 0
    max_kept_bytes: int = 0


NO_LIMITS = TenantLimits()
