"""Which model a path names, and which adapter a call is about."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from twinkle.core.adapter import WARNINGS
from twinkle.core.errors import InvalidInput, NotFound
from twinkle.core.model_names import plain_model_name
from twinkle.scheduler.placement import choose_mesh
from twinkle.server.state import ServerState
from twinkle.server.tinker.answers import answer
from twinkle.server.twinkle.sessions import SESSION_HEADER, session_of
from twinkle.storage.adapters.named import AdapterAddress, AdapterName
from twinkle.storage.journal.meshes import MeshStatus
from twinkle.wire.bodies.twinkle_calls import AdapterCreated

_MAX_MODEL_NAME = 512


async def created_answer(server: ServerState, adapter: str) -> Response:
    """The answer to ``add_adapter_to_model`` once the worker has made the adapter."""
    name = await server.common.sql.run(server.artifacts.named_adapters.name_of, adapter)
    run = await server.common.sql.run(server.artifacts.adapters.find, adapter)
    warnings = (run.user_metadata or {}).get(WARNINGS)
    return answer(
        AdapterCreated(
            adapter_name=name or adapter,
            training_run_id=adapter,
            warnings=None if warnings is None else warnings.splitlines(),
        )
    )


async def mesh_of_model(
    server: ServerState, base_model: str, *, to_sample: bool = False, whole_model: bool | None = None
) -> MeshStatus:
    """Where an adapter on this model goes, or a run of the whole model; without saying which, where it is served.

    Raises:
        NotFound: The model is not served here.
        InvalidInput: It is, but no mesh trains all of its weights.
        MeshUnavailable: No model is, or not this one for this, yet.
    """
    names = meant_models(server, base_model)
    try:
        meshes = await server.queue.meshes.all(fresh=True)
        said = [each for mesh in meshes for each in (mesh.capabilities, mesh.announced) if each is not None]
        served = {plain_model_name(each.base_model) for each in said}
        name = next((name for name in names if plain_model_name(name) in served), names[-1])
        return choose_mesh(meshes, name, to_sample=to_sample, whole_model=False if to_sample else whole_model)
    except InvalidInput as error:
        if error.field == "lora_config":
            raise InvalidInput("config", error.message.partition(": ")[2]) from None
        raise NotFound(error.message.partition(": ")[2]) from None


async def address_of(
    request: Request, server: ServerState, tenant: str, base_model: str, adapter_name: str
) -> AdapterAddress:
    """The adapter that a call is about.

    Raises:
        NotFound: There is no such adapter, or it is one on another model, or the model is not served here.
        InvalidInput: The name needs a session, and none is said.
    """
    name = AdapterName(text=adapter_name, session=None)
    if not name.is_run_id and name.parts[0] is None:
        # A session that is said need not be looked up: an adapter is found in it, or is not.
        session = request.headers.get(SESSION_HEADER) or await session_of(request, server, tenant)
        name = AdapterName(text=adapter_name, session=session)
    try:
        address = await server.common.sql.run(partial(server.artifacts.named_adapters.find, name, tenant=tenant))
    except NotFound:
        # Whoever has the model wrong is told that first.
        await mesh_of_model(server, base_model)
        raise
    if plain_model_name(address.base_model) not in map(plain_model_name, meant_models(server, base_model)):
        await mesh_of_model(server, base_model)
        raise NotFound(
            f"adapter {adapter_name!r} is on {address.base_model!r}, not on {base_model!r}; call it under"
            f" /api/v1/model/{address.base_model}/"
        )
    return address


def meant_models(server: ServerState, base_model: str) -> list[str]:
    """The id as it is said, and the id or folder that it stands for where the operator has said so."""
    if len(base_model) > _MAX_MODEL_NAME:
        raise NotFound(f"no model has a name of {len(base_model)} characters; at most {_MAX_MODEL_NAME} are looked at")
    aliases = server.common.settings.model_id_aliases
    meant = aliases.get(base_model) or aliases.get(plain_model_name(base_model))
    return [base_model] if meant is None else [base_model, meant]
