"""Twinkle's own client: what the official SDK has no words for.

Operations go out in order from a background thread and are collected over a few connections, however many are open. A
future's ``request_id`` is enough to collect the outcome from another process, and a run can be continued there.
"""

from __future__ import annotations

from twinkle.client.async_client import AsyncClient
from twinkle.client.client import Client
from twinkle.client.datum import Datum, Picture, next_token_datum
from twinkle.client.future import Future
from twinkle.client.jobs import AsyncJob, AsyncJobs, Job, Jobs
from twinkle.client.promise import Promise
from twinkle.client.run import Run
from twinkle.client.sampler import Sampler
from twinkle.client.waiting import as_completed, gather
from twinkle.core.standing import WaitReason

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncJobs",
    "Client",
    "Datum",
    "Future",
    "Job",
    "Jobs",
    "Picture",
    "Promise",
    "Run",
    "Sampler",
    "WaitReason",
    "as_completed",
    "gather",
    "next_token_datum",
]
