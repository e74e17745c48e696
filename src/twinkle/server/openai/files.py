"""``/v1/files``: tenants' files, taken in and given out in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from twinkle.core.errors import InvalidInput, TooLarge, UserError
from twinkle.core.limits import TenantLimits
from twinkle.core.names import plain_name
from twinkle.server.answering.downloads import Stored, send_stretches
from twinkle.server.openai.answers import json_answer
from twinkle.server.openai.file_shapes import FileDeleted, FileList, FileObject, file_object
from twinkle.server.openapi import BYTES, Access, Raw, described
from twinkle.server.receiving.files import (
    FactsReader,
    IncomingBody,
    IncomingFile,
    budgets_of,
    check_batch,
    holds_lines,
    keep_s_of,
)
from twinkle.server.receiving.form import FileForm
from twinkle.server.state import Accounts, Artifacts, Caller, Common
from twinkle.storage.files.records import NewFile, NewPart, NewUpload, StoredFile, Upload
from twinkle.wire.bodies.base import is_storable
from twinkle.wire.bodies.files import MAX_KEEP_S, MAX_NAME_CHARS, MIN_KEEP_S, PART_BYTES, check_purpose

_MAX_LISTED = 10_000
_FORM = Raw("multipart/form-data", "`file`, `purpose`, and perhaps `expires_after[anchor]`, `expires_after[seconds]`.")

router = APIRouter(prefix="/files")


@router.post("", openapi_extra=described(FileObject, body=_FORM, access=Access.CALLER))
async def create_file(
    request: Request, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Caller
) -> Response:
    """A new file of the tenant's. It is never in memory as a whole, and half a file is none."""
    limits = (await accounts.quotas.account(tenant)).limits
    receiving = _Receiving(common, artifacts, tenant, limits, announced=_announced(request, common))
    body = IncomingBody(request)
    form = FileForm(request.headers.get("content-type"), "file")
    incoming = IncomingFile(
        common,
        artifacts,
        await budgets_of(common, accounts, tenant),
        max_bytes=common.settings.max_file_bytes,
        reads_lines=True,
    )
    with incoming:
        try:
            async for data in body.stretches():
                for part in form.feed(data):
                    await receiving.take(incoming, part, form)
            form.finish()
            file = await receiving.complete(incoming, _named(form, common, tenant))
        except BaseException as error:
            await receiving.give_up(incoming)
            if isinstance(error, UserError):
                await body.drain()
            raise
    return json_answer(file_object(file))


class _Receiving:
    """One file on its way into rows: an upload whose parts are kept as they come, so that none is lost sight of."""

    def __init__(
        self, common: Common, artifacts: Artifacts, tenant: str, limits: TenantLimits, *, announced: int
    ) -> None:
        self._common = common
        self._artifacts = artifacts
        self._tenant = tenant
        self._max_bytes = limits.max_files_bytes
        self._announced = announced
        self._upload: Upload | None = None
        self._parts: list[str] = []

    async def take(self, incoming: IncomingFile, data: bytes, form: FileForm) -> None:
        """Take in some of the file."""
        if self._upload is None:
            if "purpose" in form.fields and not holds_lines(form.filename or "", form.fields["purpose"]):
                incoming.facts = FactsReader(reads_lines=False)
            new = NewUpload(tenant=self._tenant, purpose="", name="", size_bytes=self._announced)
            ttl_s = self._common.settings.upload_ttl_s
            begin = self._artifacts.uploads.begin
            self._upload = await self._common.sql.run(begin, new, ttl_s=ttl_s, max_bytes=self._max_bytes)
        await incoming.feed(data)
        if sum(piece.size_bytes for piece in incoming.pieces) >= PART_BYTES:
            await self._add_part(incoming)

    async def complete(self, incoming: IncomingFile, named: NewFile) -> StoredFile:
        """The file, which has come as a whole."""
        if self._upload is None:
            raise InvalidInput("file", "is empty")
        await incoming.flush()
        await self._add_part(incoming)
        reads_lines = holds_lines(named.name, named.purpose)
        facts = await self._common.object_io.run(incoming.facts.finish, reads_lines=reads_lines)
        check_batch(named.purpose, named.name, facts)
        complete = self._artifacts.uploads.complete
        return await self._common.sql.run(complete, self._upload.id, self._tenant, self._parts, facts, named=named)

    async def give_up(self, incoming: IncomingFile) -> None:
        """Leave nothing behind."""
        if self._upload is not None:
            await self._common.sql.run(self._artifacts.uploads.give_up, incoming.take_pieces())
            await self._common.sql.run(self._artifacts.uploads.cancel, self._upload.id, self._tenant)

    async def _add_part(self, incoming: IncomingFile) -> None:
        assert self._upload is not None, "it began with the first bytes"
        # The whole file's digest is what counts here.
        part = NewPart(sha256="", pieces=incoming.take_pieces(), number=len(self._parts))
        added = await self._common.sql.run(
            self._artifacts.uploads.add_part,
            self._upload.id,
            self._tenant,
            part,
            ttl_s=self._common.settings.upload_ttl_s,
            max_bytes=self._max_bytes,
        )
        self._parts.append(added.id)


def _announced(request: Request, common: Common) -> int:
    """How many bytes may come: the form's own, of which the file's are fewer, if the client has said so."""
    length = request.headers.get("content-length", "")
    most = common.settings.max_file_bytes
    if not length.isdecimal():
        return most
    if int(length) > most + PART_BYTES:
        raise TooLarge(f"file: has about {length} bytes; a file may have {most}")
    return int(length)


def _named(form: FileForm, common: Common, tenant: str) -> NewFile:
    """What the form says of the file."""
    name, purpose = form.filename or "", form.fields.get("purpose", "")
    if not purpose:
        raise InvalidInput("purpose", "is missing")
    check_purpose(purpose)
    if len(name) > MAX_NAME_CHARS or not is_storable(name):
        raise InvalidInput("file", f"must have a name of at most {MAX_NAME_CHARS} characters")
    try:
        plain_name(name)
    except ValueError as error:
        raise InvalidInput("file", f"its name {error}") from None
    keep_s = keep_s_of(common, purpose, _keep_s(form.fields))
    expires_at = None if keep_s is None else common.clock.now() + keep_s
    return NewFile(tenant=tenant, purpose=purpose, name=name, expires_at=expires_at)


def _keep_s(fields: Mapping[str, str]) -> float | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidInput("expires_after.anchor", "must be 'created_at'")
    if seconds is None or not seconds.isdecimal() or not MIN_KEEP_S <= int(seconds) <= MAX_KEEP_S:
        raise InvalidInput("expires_after.seconds", f"must be a whole number from {MIN_KEEP_S} to {MAX_KEEP_S}")
    return float(seconds)


@router.get("", openapi_extra=described(FileList, refusals=[404], access=Access.CALLER))
async def list_files(
    common: Common,
    artifacts: Artifacts,
    tenant: Caller,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = _MAX_LISTED,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """The tenant's files, the newest first unless asked otherwise."""
    page = artifacts.files.page
    found = await common.listings.run(tenant, page, tenant, limit=limit + 1, after=after, purpose=purpose, order=order)
    files = [file_object(file) for file in found[:limit]]
    return json_answer(
        FileList(
            object="list",
            data=files,
            has_more=len(found) > limit,
            first_id=files[0]["id"] if files else None,
            last_id=files[-1]["id"] if files else None,
        )
    )


@router.get("/{file_id}", openapi_extra=described(FileObject, refusals=[404], access=Access.CALLER))
async def show_file(file_id: str, common: Common, artifacts: Artifacts, tenant: Caller) -> Response:
    """One file."""
    return json_answer(file_object(await common.sql.run(artifacts.files.find, file_id, tenant)))


@router.delete("/{file_id}", openapi_extra=described(FileDeleted, refusals=[404], access=Access.CALLER))
async def delete_file(file_id: str, common: Common, artifacts: Artifacts, tenant: Caller) -> Response:
    """End a file. A job that reads it fails."""
    await common.sql.run(artifacts.files.delete, file_id, tenant)
    return json_answer(FileDeleted(id=file_id, object="file", deleted=True))


@router.get(
    "/{file_id}/content",
    openapi_extra=described(
        Raw(BYTES, "The file."),
        others={206: Raw(BYTES, "The part of it that was asked for.")},
        refusals=[404, 416],
        headers=["Range"],
        access=Access.CALLER,
    ),
)
async def download_file(
    file_id: str, request: Request, common: Common, artifacts: Artifacts, tenant: Caller
) -> Response:
    """A file's bytes, streamed, or with a ``Range`` header some of them."""
    file = await common.sql.run(artifacts.files.find, file_id, tenant)
    pieces = await common.sql.run(artifacts.files.pieces, file)
    return send_stretches(common, artifacts, request, [Stored(piece.key, piece.size_bytes) for piece in pieces])
