"""Uploads by whichever door they come: their parts taken in, and made into files.

At the end the bytes are read once more, and looked at as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request

from twinkle.core.errors import InvalidInput, UserError
from twinkle.server.receiving.files import IncomingBody, IncomingFile, budgets_of, check_batch, facts_of, holds_lines
from twinkle.server.receiving.form import FileForm
from twinkle.server.state import AccountParts, ArtifactParts, CommonParts
from twinkle.storage.files.reading import stretches_of
from twinkle.storage.files.records import NewPart, StoredFile, Upload, UploadPart
from twinkle.wire.bodies.files import PART_BYTES


async def receive_part(
    request: Request,
    common: CommonParts,
    accounts: AccountParts,
    artifacts: ArtifactParts,
    *,
    tenant: str,
    upload_id: str,
    number: int | None = None,
    form: FileForm | None = None,
) -> UploadPart:
    """Take in a part: the body, or the file of a form. What came of it is given up if it does not come whole.

    Raises:
        NotFound: There is no such upload, or it is another tenant's.
        InvalidInput: It is empty, or no such form.
        TooLarge: It is larger than a part may be.
        LimitReached: The tenant may store no more.
        Conflict: The upload was cancelled or has ended.
    """
    await common.sql.run(artifacts.uploads.find, upload_id, tenant)
    limits = (await accounts.quotas.account(tenant)).limits
    body = IncomingBody(request)
    budgets = await budgets_of(common, accounts, tenant)
    with IncomingFile(common, artifacts, budgets, max_bytes=PART_BYTES) as incoming:
        try:
            async for data in body.stretches():
                for stretch in [data] if form is None else form.feed(data):
                    await incoming.feed(stretch)
            if form is not None:
                form.finish()
            if not incoming.size_bytes:
                raise InvalidInput("body" if form is None else form.file_field, "is empty")
            await incoming.flush()
        except BaseException as error:
            await common.sql.run(artifacts.uploads.give_up, incoming.take_pieces())
            if isinstance(error, UserError):
                await body.drain()
            raise
        digest = incoming.facts.finish().sha256
        new = NewPart(sha256=digest, pieces=incoming.take_pieces(), number=number)
    return await common.sql.run(
        artifacts.uploads.add_part,
        upload_id,
        tenant,
        new,
        ttl_s=common.settings.upload_ttl_s,
        max_bytes=limits.max_files_bytes,
    )


async def complete_upload(
    common: CommonParts, artifacts: ArtifactParts, upload: Upload, part_ids: Sequence[str], *, md5: str | None = None
) -> StoredFile:
    """The file of some parts.

    Raises:
        InvalidInput: The parts are not those of this upload, or their bytes not those that were announced.
        NotFound: The file of this upload was deleted.
        Conflict: The upload was cancelled or has ended.
    """
    if upload.file is not None:
        return await common.sql.run(artifacts.files.find, upload.file, upload.tenant)
    pieces = await common.sql.run(artifacts.uploads.pieces, upload, part_ids)
    reads_lines = holds_lines(upload.name, upload.purpose)
    stretches = stretches_of(artifacts.blobs, pieces)
    facts, found_md5 = await common.object_io.run(facts_of, stretches, reads_lines=reads_lines)
    if md5 is not None and md5.lower() != found_md5:
        raise InvalidInput("md5", f"is {md5[:64]!r}, but that of the parts is {found_md5}; send the broken part again")
    if upload.sha256 not in (None, facts.sha256):
        raise InvalidInput("sha256", f"is {upload.sha256}, but that of the parts is {facts.sha256}; begin a new upload")
    check_batch(upload.purpose, upload.name, facts)
    return await common.sql.run(artifacts.uploads.complete, upload.id, upload.tenant, part_ids, facts)
