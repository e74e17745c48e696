"""``/v1/uploads``: large files in parts, put together when all have come."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import TooLarge
from twinkle.server.openai.answers import json_answer
from twinkle.server.openai.file_shapes import (
    UploadObject,
    UploadPartObject,
    part_object,
    upload_object,
)
from twinkle.server.openapi import Access, Raw, described
from twinkle.server.receiving.files import keep_s_of
from twinkle.server.receiving.form import FileForm
from twinkle.server.receiving.uploading import complete_upload, receive_part
from twinkle.server.state import Accounts, Artifacts, Caller, Common
from twinkle.storage.files.records import NewUpload
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.files import CompleteUploadRequest, CreateUploadRequest, check_purpose

_FORM = Raw("multipart/form-data", "`data`: the bytes of the part.")

router = APIRouter(prefix="/uploads")


@router.post("", openapi_extra=described(UploadObject, body=CreateUploadRequest, access=Access.CALLER))
async def create_upload(
    request: Request, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Caller
) -> Response:
    """Announce a file that comes in parts."""
    body = parse_body(CreateUploadRequest, await common.bodies.read(request))
    check_purpose(body.purpose)
    if body.bytes > common.settings.max_file_bytes:
        raise TooLarge(f"bytes: are {body.bytes}; a file may have {common.settings.max_file_bytes}")
    asked_s = None if body.expires_after is None else float(body.expires_after.seconds)
    new = NewUpload(
        tenant=tenant,
        purpose=body.purpose,
        name=body.filename,
        size_bytes=body.bytes,
        keep_s=keep_s_of(common, body.purpose, asked_s),
    )
    limits = (await accounts.quotas.account(tenant)).limits
    upload = await common.sql.run(
        artifacts.uploads.begin, new, ttl_s=common.settings.upload_ttl_s, max_bytes=limits.max_files_bytes
    )
    return json_answer(upload_object(upload))


@router.post(
    "/{upload_id}/parts",
    openapi_extra=described(UploadPartObject, body=_FORM, refusals=[404], access=Access.CALLER),
)
async def create_part(
    upload_id: str, request: Request, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Caller
) -> Response:
    """Send a part; which place it has is said at the end."""
    form = FileForm(request.headers.get("content-type"), "data")
    part = await receive_part(request, common, accounts, artifacts, tenant=tenant, upload_id=upload_id, form=form)
    return json_answer(part_object(part))


@router.post(
    "/{upload_id}/complete",
    openapi_extra=described(UploadObject, body=CompleteUploadRequest, refusals=[404], access=Access.CALLER),
)
async def complete(upload_id: str, request: Request, common: Common, artifacts: Artifacts, tenant: Caller) -> Response:
    """Make a file of the parts that are named, in this order. Twice is the same file."""
    body = parse_body(CompleteUploadRequest, await common.bodies.read(request))
    upload = await common.sql.run(artifacts.uploads.find, upload_id, tenant)
    file = await complete_upload(common, artifacts, upload, body.part_ids, md5=body.md5)
    return json_answer(upload_object(upload, file))


@router.post("/{upload_id}/cancel", openapi_extra=described(UploadObject, refusals=[404], access=Access.CALLER))
async def cancel(upload_id: str, common: Common, artifacts: Artifacts, tenant: Caller) -> Response:
    """Give an upload up."""
    return json_answer(upload_object(await common.sql.run(artifacts.uploads.cancel, upload_id, tenant)))
