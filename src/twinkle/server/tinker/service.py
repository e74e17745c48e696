"""What a client asks before anything else: how to behave, and what is served here."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Request, Response

from twinkle.server.openapi import described
from twinkle.server.state import Common, Queue, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.storage.journal.meshes import MeshStatus
from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.bodies.session import (
    CapabilitiesResponse,
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    SupportedModel,
    TelemetryRequest,
    TelemetryResponse,
)

router = APIRouter()


@router.post(
    "/client/config",
    openapi_extra=described(ClientConfigResponse, body=ClientConfigRequest, body_required=False),
)
async def client_config(common: Common, _: Tenant) -> Response:
    """Flags for a client's lifetime: the operator's, else the SDK's own defaults, and protobuf for those before 0.25.

    A poll for many samples is told apart by the number of its client, so clones then ask for theirs.
    """
    together = True if common.settings.poll_samples_together else None
    flags = ClientConfigResponse(
        pjwt_auth_enabled=True if common.settings.jwt_auth else None,
        proto_write_fwdbwd=True,
        fwd_via_fwdbwd=True,
        create_model_via_load_weights=True,
        sample_use_retrieve_futures=together,
        sample_join_sampling_session=together,
        custom_loss_server_side=True if common.settings.custom_loss_server_side else None,
    )
    return answer(flags.model_copy(update=_chosen(common, of=ClientConfigResponse)))


@router.post(
    "/client/dynamic_config",
    openapi_extra=described(ClientDynamicConfigResponse, body=ClientConfigRequest, body_required=False),
)
async def client_dynamic_config(common: Common, _: Tenant) -> Response:
    """Flags a client asks for again every few minutes."""
    flags = ClientDynamicConfigResponse(sample_cancel_enabled=True)
    return answer(flags.model_copy(update=_chosen(common, of=ClientDynamicConfigResponse)))


@router.post("/telemetry", openapi_extra=described(TelemetryResponse, body=TelemetryRequest, body_required=False))
async def telemetry(request: Request, common: Common, _: Tenant) -> Response:
    """Taken and dropped: what a client does is its own affair."""
    await common.bodies.drop(request)
    return answer(TelemetryResponse())


@router.get("/get_server_capabilities", openapi_extra=described(CapabilitiesResponse))
async def get_server_capabilities(queue: Queue, _: Tenant) -> Response:
    """The base models of all meshes, whether their workers live just now or not."""
    return answer(CapabilitiesResponse(supported_models=served_models(await queue.meshes.all())))


def served_models(meshes: Iterable[MeshStatus]) -> list[SupportedModel]:
    """The base models of some meshes, by name."""
    models = {
        capabilities.base_model: SupportedModel(
            model_name=capabilities.base_model,
            max_context_length=capabilities.max_context_length,
            trainable=True,
            sampleable=True,
        )
        for mesh in meshes
        if (capabilities := mesh.capabilities) is not None
    }
    return [models[name] for name in sorted(models)]


def _chosen(common: Common, *, of: type[ResponseBody]) -> dict[str, bool | int]:
    """The flags the operator set, as far as they belong into this answer."""
    return common.settings.client_flags.model_dump(include=set(of.model_fields), exclude_none=True)
