"""What the tenant used. The numbers are the journal's own; none of them lags."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import AwareDatetime

from twinkle.core.errors import InvalidInput
from twinkle.server.openapi import described
from twinkle.server.state import Accounts, Common, Tenant
from twinkle.server.tinker.answers import answer, moment
from twinkle.storage.tenants.accounting import BYTES_PER_GIGABYTE, HOUR_S, UsagePlace, Work
from twinkle.storage.tenants.sessions import FoundSession
from twinkle.wire.bodies.billing import (
    CheckpointUsage,
    PrefillUsage,
    SamplingUsage,
    StorageUsage,
    StoredItem,
    StoredResponse,
    TrainingUsage,
    UsageEvent,
    UsageInfo,
    UsageResponse,
    UsageSession,
)

_LONGEST = timedelta(days=14)

router = APIRouter(prefix="/billing/usage")


@router.get("/events", openapi_extra=described(UsageResponse))
async def usage_events(
    common: Common, accounts: Accounts, tenant: Tenant, starting_on: AwareDatetime, ending_before: AwareDatetime
) -> Response:
    """Hour by hour: tokens trained, prefilled and sampled, checkpoints written, gigabyte-hours stored."""
    start, end = _window(starting_on, ending_before)
    return answer(await common.listings.run(tenant, _usage, accounts, tenant, start, end))


@router.get("/checkpoints/current", openapi_extra=described(StoredResponse))
async def stored_now(
    common: Common, accounts: Accounts, tenant: Tenant, project_id: Annotated[str | None, Query(max_length=4096)] = None
) -> Response:
    """What checkpoints take up now, project by project; nameless weights that can be sampled from are among them."""
    owner = await common.sql.run(accounts.tenants.name_of, tenant)
    stored = await common.listings.run(tenant, accounts.accounting.stored, tenant, project_id=project_id)
    return answer(
        StoredResponse(
            data=[
                StoredItem(
                    project_id=item.project_id,
                    user_name=owner,
                    checkpoint_count=item.num_checkpoints + item.num_ephemeral,
                    size_bytes=item.total_bytes,
                    size_gigabytes=item.total_bytes / BYTES_PER_GIGABYTE,
                )
                for item in stored
            ]
        )
    )


def _window(starting_on: datetime, ending_before: datetime) -> tuple[int, int]:
    for name, at in (("starting_on", starting_on), ("ending_before", ending_before)):
        if at.timestamp() % HOUR_S:
            raise InvalidInput(name, "must be a full hour, like 2026-07-13T00:00:00Z")
    if not timedelta(0) < ending_before - starting_on <= _LONGEST:
        raise InvalidInput("ending_before", f"must be after starting_on, by at most {_LONGEST.days} days")
    return int(starting_on.timestamp()), int(ending_before.timestamp())


def _usage(accounts: Accounts, tenant: str, start: int, end: int) -> UsageResponse:
    owner = accounts.tenants.name_of(tenant)
    work = accounts.accounting.work(tenant, start=start, end=end)
    storage = accounts.accounting.gigabyte_hours(tenant, start=start, end=end)
    places = sorted({*work, *storage}, key=lambda place: (place.hour, place.session, place.base_model))
    sessions = {place.session: accounts.sessions.find(tenant, place.session) for place in places}
    events = []
    for place in places:
        kinds = [*_kinds_of(work.get(place, Work()))]
        if place in storage:
            kinds.append((StorageUsage(gigabyte_hours=storage[place]), None))
        events += [_event(place, owner, sessions[place.session], info, device_s) for info, device_s in kinds]
    of_files = accounts.accounting.file_gigabyte_hours(tenant, start=start, end=end)
    events += [_file_event(hour, owner, gigabyte_hours) for hour, gigabyte_hours in sorted(of_files.items())]
    return UsageResponse(
        data=events,
        sessions={id_: UsageSession(user_metadata=found.user_metadata) for id_, found in sessions.items()},
    )


def _kinds_of(work: Work) -> list[tuple[UsageInfo, float | None]]:
    """Each kind of work that was done, with the device seconds it is charged for."""
    kinds: list[tuple[UsageInfo, float | None]] = []
    if work.num_trained:
        kinds.append((TrainingUsage(token_count=work.num_trained), work.training_device_s))
    if work.num_prefilled:
        kinds.append((PrefillUsage(token_count=work.num_prefilled), None))
    if work.num_sampled:
        kinds.append((SamplingUsage(token_count=work.num_sampled), work.sampling_device_s))
    if work.num_checkpoints:
        kinds.append((CheckpointUsage(count=work.num_checkpoints), None))
    return kinds


def _file_event(hour: int, owner: str, gigabyte_hours: float) -> UsageEvent:
    """Files belong to no session."""
    return UsageEvent(
        bucket_start=moment(hour * HOUR_S),
        bucket_end=moment((hour + 1) * HOUR_S),
        user_name=owner,
        event_info=StorageUsage(gigabyte_hours=gigabyte_hours),
    )


def _event(place: UsagePlace, owner: str, session: FoundSession, info: UsageInfo, device_s: float | None) -> UsageEvent:
    return UsageEvent(
        bucket_start=moment(place.hour * HOUR_S),
        bucket_end=moment((place.hour + 1) * HOUR_S),
        base_model=place.base_model,
        user_name=owner,
        session_id=place.session,
        project_id=session.project_id,
        device_seconds=device_s,
        event_info=info,
    )
