"""``GET /v1/models``: the base models, the caller's sampler checkpoints, and the names of those that jobs have made."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, Response

from twinkle.core.adapter import CheckpointKind
from twinkle.core.errors import NotFound
from twinkle.server.fine_tuned import PREFIX
from twinkle.server.openai.answers import json_answer
from twinkle.server.openai.drawing import find_model
from twinkle.server.openai.shapes import DeletedModel, ModelInfo, ModelList
from twinkle.server.openapi import Access, described
from twinkle.server.state import Accounts, Artifacts, Caller, Common, Queue
from twinkle.server.tinker.checkpoints import delete
from twinkle.wire.paths import parse_checkpoint_path

_MAX_CHECKPOINTS = 1000

router = APIRouter(prefix="/models")


@router.get("", openapi_extra=described(ModelList, access=Access.CALLER))
async def list_models(common: Common, queue: Queue, artifacts: Artifacts, tenant: Caller) -> Response:
    """What may stand in ``model``; of the checkpoints the newest."""
    meshes = await queue.meshes.all()
    names = sorted({mesh.capabilities.base_model for mesh in meshes if mesh.capabilities is not None})
    found, _ = await common.listings.run(tenant, artifacts.checkpoints.page, tenant, limit=_MAX_CHECKPOINTS, offset=0)
    checkpoints = [checkpoint for checkpoint in found if checkpoint.kind is CheckpointKind.SAMPLER]
    tuned = await common.sql.run(artifacts.fine_tuned.of_checkpoints, tenant, [one.path for one in checkpoints])
    data = [_model(name) for name in names]
    data += [_model(checkpoint.path, created_at=checkpoint.created_at) for checkpoint in checkpoints]
    data += [_model(name, created_at=created_at) for name, created_at in tuned]
    return json_answer(ModelList(object="list", data=data))


@router.get("/{name:path}", openapi_extra=described(ModelInfo, refusals=[404], access=Access.CALLER))
async def show_model(name: str, common: Common, queue: Queue, artifacts: Artifacts, tenant: Caller) -> Response:
    """One model, if the caller may use it."""
    model = await find_model(common, queue, artifacts, tenant, name)
    return json_answer(_model(name, created_at=0.0 if model.checkpoint is None else model.checkpoint.created_at))


@router.delete("/{name:path}", openapi_extra=described(DeletedModel, refusals=[404], access=Access.CALLER))
async def delete_model(name: str, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Caller) -> Response:
    """Delete the checkpoint behind a name; of a fine-tuned model both forms of it. Base models stay."""
    if name.startswith(PREFIX):
        find = artifacts.fine_tuned
        paths = [await common.sql.run(look, name, tenant) for look in (find.sampler_path, find.training_path)]
    else:
        paths = [str(parse_checkpoint_path(name, field="model"))]
    await delete(common, accounts, artifacts, tenant, paths[0])
    for path in paths[1:]:
        with suppress(NotFound):
            await delete(common, accounts, artifacts, tenant, path)
    return json_answer(DeletedModel(id=name, object="model", deleted=True))


def _model(name: str, *, created_at: float = 0.0) -> ModelInfo:
    return ModelInfo(id=name, object="model", created=int(created_at), owned_by="twinkle")
