"""Checkpoints as tar files, which is how SDKs before 0.36 download them.

An archive is never stored: it is put together from the checkpoint's files while it is sent, the same bytes each time.
"""

from __future__ import annotations

import tarfile

from fastapi import APIRouter, Request, Response

from twinkle.core.adapter import Checkpoint
from twinkle.core.errors import NotFound, StorageUnavailable
from twinkle.server.downloads import FILE, Expires, Generation, Stored, Stretch, send_stretches, size_of
from twinkle.server.links import ARCHIVES, Given
from twinkle.server.state import Artifacts, Common
from twinkle.wire.paths import SCHEME

COMPLETE = "checkpoint_complete"
"""The empty last member: `tinker checkpoint push-hf` takes an archive without it for a broken one."""

router = APIRouter(prefix=ARCHIVES)


@router.get("/{run_id}/{segment}/{name}.tar", openapi_extra=FILE)
@router.head("/{run_id}/{segment}/{name}.tar", openapi_extra=FILE)
async def archive(
    run_id: str,
    segment: str,
    name: str,
    request: Request,
    common: Common,
    artifacts: Artifacts,
    content: str,
    generation: Generation,
    expires: Expires,
    signature: str,
) -> Response:
    """The weights of a checkpoint, for as long as its owner does not take back what was given out."""
    path = f"{SCHEME}{run_id}/{segment}/{name}"
    given = Given(content=content, generation=generation, expires_at=expires, signature=signature)
    artifacts.links.check_archive(path, given)
    checkpoint = await common.sql.run(artifacts.catalog.content, content)
    given.check_still(checkpoint)
    stretches = lay_out(checkpoint)
    for stretch in stretches:
        if isinstance(stretch, Stored):
            await _check_stored(common, artifacts, stretch)
    return send_stretches(common, artifacts, request, stretches)


def lay_out(checkpoint: Checkpoint) -> list[Stretch]:
    """What an archive consists of: the files for whoever uses the adapter, not those for who trains it."""
    stretches: list[Stretch] = []
    for name, file in sorted(checkpoint.weight_files.items()):
        stretches += [_header(name, file.size_bytes), Stored(file.key, file.size_bytes), _padding(file.size_bytes)]
    stretches.append(_header(COMPLETE, 0))
    size_bytes = sum(size_of(stretch) for stretch in stretches) + 2 * tarfile.BLOCKSIZE
    stretches.append(bytes(2 * tarfile.BLOCKSIZE + -size_bytes % tarfile.RECORDSIZE))
    return stretches


def _header(name: str, size_bytes: int) -> bytes:
    # The time stays that of the epoch: a checkpoint that is saved again unchanged keeps its bytes.
    member = tarfile.TarInfo(name)
    member.size = size_bytes
    return member.tobuf(tarfile.PAX_FORMAT)


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


async def _check_stored(common: Common, artifacts: Artifacts, file: Stored) -> None:
    """Before the first byte is sent: afterwards a fault could only be told by breaking off."""
    try:
        size_bytes = await common.object_io.run(artifacts.blobs.size_bytes, file.key)
    except KeyError:
        raise NotFound("this checkpoint was deleted") from None
    if size_bytes != file.size_bytes:
        raise StorageUnavailable(f"{file.key} is not what was written: {size_bytes} of {file.size_bytes} bytes")
