"""Adapters in folders of the server's disk, copied as checkpoints of the caller's when a call that names them comes.

What a call means is settled then: the folder may change or go, and a replay still loads what was there.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

from fastapi import Request
from pydantic_core import from_json

from twinkle.core.adapter import AdapterConfig, Checkpoint, StoredFile
from twinkle.core.errors import Forbidden, InvalidInput
from twinkle.core.file_names import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from twinkle.core.ids import new_id
from twinkle.core.model_names import plain_model_name
from twinkle.core.scopes import Scope
from twinkle.server.state import ServerState, scopes_of
from twinkle.server.twinkle.adapters import meant_models
from twinkle.storage.blobs import CHECKPOINTS, BlobStore, day_of
from twinkle.storage.checkpoints.brought import NewBrought, Origin
from twinkle.storage.opened_folders import digest_of
from twinkle.storage.tenants.sessions import NewSession
from twinkle.wire.bodies.base import MAX_INT32
from twinkle.wire.twinkle_requests import NO_FOLDERS, checkpoint_name

_SESSION_KEY = "\x1ffolders"
_HEADER_SIZE_BYTES = 8
_MAX_HEADER_BYTES = 64 * 2**20
_PATH_BEGINNINGS = ("/", ".", "~")
_DEFAULT_ALPHA = 8.0
_MAX_NAMED = 512


def is_folder(name: str) -> bool:
    """Whether a client names a folder of the server's disk."""
    return name.startswith("/")


async def brought_in(
    request: Request, server: ServerState, tenant: str, path: str, *, base_model: str, mesh: str, field: str
) -> Checkpoint:
    """The checkpoint that holds what a folder has in it now; it is made unless the caller has it already.

    Args:
        request: The call.
        server: The server's parts.
        tenant: Whose checkpoint it becomes, and whose limits hold.
        path: The folder.
        base_model: The one that the adapter is for.
        mesh: One that serves it.
        field: What the caller calls ``path``.

    Raises:
        InvalidInput: The folder is not open to clients, or holds no adapter of this model.
        TooLarge: It has more bytes than is taken from a folder.
        LimitReached: The tenant has as many checkpoints, or runs, as it may have.
        Forbidden: The caller's key may not make checkpoints, and this would be one.
    """
    folders, object_io = server.artifacts.folders, server.common.object_io
    if not folders.are_any:
        raise InvalidInput(field, NO_FOLDERS)
    digest = await object_io.run(partial(folders.digest, path, field=field))
    origin = Origin(tenant=tenant, base_model=base_model, folder=path, digest=digest)
    found = await server.common.sql.run(server.artifacts.brought.find, origin)
    if found is not None:
        return found
    if Scope.TRAIN not in scopes_of(request):
        raise Forbidden(
            f"{field}: {path} would become a checkpoint, and this key may make none; call once with a key that may"
            " train, or name a checkpoint"
        )
    files = await object_io.run(partial(folders.read, path, field=field))
    origin = Origin(tenant=tenant, base_model=base_model, folder=path, digest=digest_of(files))
    config = _config_of(server, files, path, base_model, field)
    size_bytes = sum(map(len, files.values()))
    await server.accounts.holdings.take_run(tenant)
    await server.accounts.holdings.take_checkpoint(tenant, size_bytes)
    new_session = NewSession(display_name="adapters from folders", idempotency_key=_SESSION_KEY)
    session = await server.common.sql.run(server.accounts.sessions.open, tenant, new_session)
    await server.common.sql.run(server.accounts.sessions.finish, tenant, session, reason="success", detail=None)
    stored = await object_io.run(_store_all, server.artifacts.blobs, files, server.common.clock.now())
    new = NewBrought(
        origin=origin,
        session=session,
        mesh=mesh,
        config=config,
        name=checkpoint_name(path.rstrip("/").rpartition("/")[2]) or "folder",
        files=stored,
    )
    return await server.common.sql.run(server.artifacts.brought.bring, new)


def _store_all(blobs: BlobStore, files: dict[str, bytes], now: float) -> dict[str, StoredFile]:
    """Write files under keys of their own. Blocks."""
    folder = f"{CHECKPOINTS}{day_of(now)}/brought/{new_id()}"
    stored = {}
    for name, content in files.items():
        key = f"{folder}/{name}"
        blobs.put(key, content)
        stored[name] = StoredFile(key=key, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return stored


def _config_of(server: ServerState, files: dict[str, bytes], path: str, base_model: str, field: str) -> AdapterConfig:
    """What the files say of the adapter. Whether its tensors fit is the worker's to judge, who has the model."""
    _check_tensors(files[ADAPTER_WEIGHTS_FILE], path, field)
    said = _settings(files[ADAPTER_CONFIG_FILE], path, field)
    rank, alpha = said.get("r"), said.get("lora_alpha", _DEFAULT_ALPHA)
    if said.get("peft_type", "LORA") != "LORA" or type(rank) is not int or not 1 <= rank <= MAX_INT32:
        raise InvalidInput(field, f"{ADAPTER_CONFIG_FILE} of {path} is of no LoRA adapter: it needs a rank r from 1 on")
    if type(alpha) not in (int, float) or not 0 < alpha <= MAX_INT32:
        raise InvalidInput(field, f"lora_alpha in {ADAPTER_CONFIG_FILE} of {path} must be a number above 0")
    named = said.get("base_model_name_or_path")
    if isinstance(named, str) and named and not named.startswith(_PATH_BEGINNINGS):
        theirs = {_last_part(name) for name in meant_models(server, named[:_MAX_NAMED])}
        if _last_part(base_model) not in theirs:
            raise InvalidInput(
                field,
                f"{path} is an adapter of {named[:200]!r}, and this is {base_model!r}; where both are one model, the"
                " operator can say so (TWINKLE_MODEL_ID_ALIASES)",
            )
    return AdapterConfig(base_model=base_model, rank=rank, seed=0, alpha=float(alpha))


def _last_part(model: str) -> str:
    return plain_model_name(model).rpartition("/")[2].casefold()


def _settings(content: bytes, path: str, field: str) -> dict[str, Any]:
    try:
        said = from_json(content)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise InvalidInput(field, f"{ADAPTER_CONFIG_FILE} of {path} is no JSON object")
    return said


def _check_tensors(content: bytes, path: str, field: str) -> None:
    """Refuse what is no safetensors file, or only the beginning of one."""
    length = int.from_bytes(content[:_HEADER_SIZE_BYTES], "little")
    try:
        if length > _MAX_HEADER_BYTES:
            raise ValueError
        header = from_json(content[_HEADER_SIZE_BYTES : _HEADER_SIZE_BYTES + length])
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise InvalidInput(field, f"{ADAPTER_WEIGHTS_FILE} of {path} is no safetensors file") from None
    if _HEADER_SIZE_BYTES + length + max(ends, default=0) != len(content):
        raise InvalidInput(field, f"{ADAPTER_WEIGHTS_FILE} of {path} is not whole: it was cut off, or is being written")
