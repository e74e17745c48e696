"""What the pinned SDK can call, send and read: all of it is served, but for what docs/tinker-compatibility.md says."""

from __future__ import annotations

import re
from pathlib import Path

from harness.sdk_surface import (
    client_flags,
    unknown_fields,
    unknown_parameters,
    unknown_protobuf_fields,
    unknown_routes,
)
from twinkle.core.setting_groups.api import ClientFlags

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "tinker-compatibility.md"

NO_MODELS_OF_OURS = {
    # What the SDK makes of a JWT.
    "WhoamiResponse",
    # Parameters of a GET, and a body of one constant.
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "HealthResponse",
}

NOT_READ = {
    # Sound and pictures by their address are refused.
    *(f"SampleRequest.prompt.chunks.{name}" for name in ("dmel", "location")),
    # A cursor is opaque and signed: its other half says all.
    "SessionSearchRequest.cursor.last_created_at",
    # Telemetry is dropped.
    *(f"TelemetrySendRequest.{name}" for name in ("platform", "process_uuid", "sdk_version")),
}

NEVER_SENT = {
    # Flags left at the SDK's default.
    "ClientConfigResponse.credential_default_source",
    # Nothing has a price, and an account has no users of its own.
    "BillingUsageResponse.cost_data_through",
    "BillingUsageResponse.data.effective_rate_usd_per_gigabyte_month",
    "BillingUsageResponse.data.effective_rate_usd_per_million_tokens",
    "BillingUsageResponse.data.estimated_cost_usd",
    "BillingUsageResponse.data.user_id",
    "CurrentCheckpointStorageUsageResponse.data.estimated_monthly_cost_usd",
    "CurrentCheckpointStorageUsageResponse.data.org_user_urn",
    "CurrentCheckpointStorageUsageResponse.data.user_email",
    "CurrentCheckpointStorageUsageResponse.effective_rate_usd_per_gigabyte_month",
    "AuditLogResponse.entries.purpose",
    # Sessions end by themselves or by their client.
    "SessionSearchResponse.sessions.status.category",
    "SessionSearchResponse.sessions.status.message",
}

OLDER_FLAGS = {"proto_write_fwdbwd", "fwd_via_fwdbwd", "create_model_via_load_weights"}
"""Flags of SDKs before the pinned one."""

FLAG_ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (free)?", re.MULTILINE)

UNUSED_MESSAGES = {"SamplingParams", "StopStrings", "StopTokens"}
"""In the SDK's schema, but in no request or response of it."""


def test_every_route_of_the_sdk_is_served() -> None:
    assert unknown_routes() == []


def test_every_parameter_of_the_sdk_is_read_but_for_the_scope_of_an_account_that_is_one_tenant() -> None:
    assert {parameter.partition("?")[2] for parameter in unknown_parameters()} == {"access_scope"}


def test_every_field_of_the_sdk_is_known_but_for_those_of_what_is_not_there() -> None:
    assert set(unknown_fields()) == NO_MODELS_OF_OURS | NOT_READ | NEVER_SENT


def test_every_protobuf_field_of_the_sdk_has_its_number_here() -> None:
    assert {field.partition(".")[0] for field in unknown_protobuf_fields()} == UNUSED_MESSAGES


def test_every_flag_of_the_sdk_is_documented_and_the_free_ones_can_be_set() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("\n## Flags\n")[2].partition("\n## ")[0]
    rows = [(set(re.findall(r"\w+", names)), free) for names, free in FLAG_ROW.findall(section)]

    assert set().union(*(names for names, _ in rows)) == client_flags() | OLDER_FLAGS
    free = set().union(*(names for names, free in rows if free))
    assert free | {"sample_cancel_enabled"} == set(ClientFlags.model_fields)
