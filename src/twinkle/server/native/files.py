"""Uploads that survive a broken line or a killed client, and that need no sending of what the tenant has already."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from twinkle.core.errors import TooLarge
from twinkle.server.answering.downloads import Stored, send_stretches
from twinkle.server.openapi import BYTES, Raw, described
from twinkle.server.receiving.files import check_batch, holds_lines, keep_s_of
from twinkle.server.receiving.uploading import complete_upload, receive_part
from twinkle.server.state import Accounts, Artifacts, Common, Tenant
from twinkle.server.tinker.answers import NO_CONTENT, answer
from twinkle.storage.files.records import NewFile, NewUpload, StoredFile, UploadPart
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.files import (
    MAX_PARTS,
    FileInfo,
    FilesResponse,
    OpenUploadRequest,
    OpenUploadResponse,
    PartInfo,
    check_purpose,
)

PartNumber = Annotated[int, Path(ge=0, lt=MAX_PARTS)]

_MAX_LISTED = 1000
CONTENT = described(
    Raw(BYTES, "The file."),
    others={206: Raw(BYTES, "The part of it that was asked for.")},
    refusals=[404, 416],
    headers=["Range"],
)

router = APIRouter()


@router.post("/uploads", openapi_extra=described(OpenUploadResponse, body=OpenUploadRequest))
async def open_upload(
    request: Request, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """Begin, or go on: the file if the tenant has its bytes, else the upload with the parts that have come."""
    body = parse_body(OpenUploadRequest, await common.bodies.read(request))
    check_purpose(body.purpose)
    if body.size_bytes > common.settings.max_file_bytes:
        raise TooLarge(f"size_bytes: is {body.size_bytes}; a file may have {common.settings.max_file_bytes}")
    asked_s = None if body.expires_after_s is None else float(body.expires_after_s)
    new = NewUpload(
        tenant=tenant,
        purpose=body.purpose,
        name=body.filename,
        size_bytes=body.size_bytes,
        sha256=body.sha256,
        keep_s=keep_s_of(common, body.purpose, asked_s),
    )
    file = await _adopted(common, artifacts, new, body.sha256)
    if file is not None:
        return answer(OpenUploadResponse(file=file_info(file)))
    upload = await common.sql.run(artifacts.uploads.resumable, new)
    if upload is None:
        limits = (await accounts.quotas.account(tenant)).limits
        begin = artifacts.uploads.begin
        ttl_s = common.settings.upload_ttl_s
        upload = await common.sql.run(begin, new, ttl_s=ttl_s, max_bytes=limits.max_files_bytes)
    parts = await common.sql.run(artifacts.uploads.parts, upload.id)
    return answer(OpenUploadResponse(upload_id=upload.id, parts=[part_info(part) for part in parts]))


async def _adopted(common: Common, artifacts: Artifacts, new: NewUpload, sha256: str) -> StoredFile | None:
    """A file of bytes that the tenant has: only its own, or whoever knows a digest would learn what others have."""
    facts = await common.sql.run(artifacts.files.known, new.tenant, sha256)
    if facts is None or (facts.num_lines is None and holds_lines(new.name, new.purpose)):
        return None
    check_batch(new.purpose, new.name, facts)
    named = NewFile(
        tenant=new.tenant,
        purpose=new.purpose,
        name=new.name,
        expires_at=None if new.keep_s is None else common.clock.now() + new.keep_s,
    )
    return await common.sql.run(artifacts.files.adopt, named, sha256=sha256, size_bytes=new.size_bytes)


@router.put(
    "/uploads/{upload_id}/parts/{number}",
    openapi_extra=described(PartInfo, body=Raw(BYTES, "The bytes of the part."), refusals=[404]),
)
async def put_part(
    upload_id: str,
    number: PartNumber,
    request: Request,
    common: Common,
    accounts: Accounts,
    artifacts: Artifacts,
    tenant: Tenant,
) -> Response:
    """Send the part of a number. Twice is harmless."""
    part = await receive_part(request, common, accounts, artifacts, tenant=tenant, upload_id=upload_id, number=number)
    return answer(part_info(part))


@router.post("/uploads/{upload_id}/complete", openapi_extra=described(FileInfo, refusals=[404]))
async def complete(upload_id: str, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """Make a file of all numbered parts, in the order of their numbers. Twice is the same file."""
    upload = await common.sql.run(artifacts.uploads.find, upload_id, tenant)
    parts = await common.sql.run(artifacts.uploads.parts, upload_id)
    part_ids = [part.id for part in parts if part.number is not None]
    return answer(file_info(await complete_upload(common, artifacts, upload, part_ids)))


@router.get("/files", openapi_extra=described(FilesResponse, refusals=[404]))
async def list_files(
    common: Common,
    artifacts: Artifacts,
    tenant: Tenant,
    limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = 100,
    after: Annotated[str | None, Query(max_length=64)] = None,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """The tenant's files, the newest first; ``after`` is the last one of the page before."""
    found = await common.listings.run(
        tenant, artifacts.files.page, tenant, limit=limit + 1, after=after, purpose=purpose
    )
    return answer(FilesResponse(files=[file_info(file) for file in found[:limit]], has_more=len(found) > limit))


@router.get("/files/{file_id}/content", openapi_extra=CONTENT)
async def download_file(
    file_id: str, request: Request, common: Common, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """A file's bytes, streamed, or with a ``Range`` header some of them."""
    file = await common.sql.run(artifacts.files.find, file_id, tenant)
    pieces = await common.sql.run(artifacts.files.pieces, file)
    return send_stretches(common, artifacts, request, [Stored(piece.key, piece.size_bytes) for piece in pieces])


@router.delete("/files/{file_id}", openapi_extra=described(None, refusals=[404]))
async def delete_file(file_id: str, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """End a file. A job that reads it fails."""
    await common.sql.run(artifacts.files.delete, file_id, tenant)
    return Response(status_code=NO_CONTENT)


@router.get("/files/{file_id}", openapi_extra=described(FileInfo, refusals=[404]))
async def show_file(file_id: str, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """One file, with what OpenAI's form of it has no place for."""
    return answer(file_info(await common.sql.run(artifacts.files.find, file_id, tenant)))


def file_info(file: StoredFile) -> FileInfo:
    """A file in our words."""
    return FileInfo(
        id=file.id,
        filename=file.name,
        purpose=file.purpose,
        size_bytes=file.size_bytes,
        sha256=file.sha256,
        status=file.status.value,
        problem=file.problem,
        num_lines=file.num_lines,
        created_at=file.created_at,
        expires_at=file.expires_at,
    )


def part_info(part: UploadPart) -> PartInfo:
    """A part in our words."""
    return PartInfo(number=part.number or 0, size_bytes=part.size_bytes, sha256=part.sha256)
