"""Uploads made into files, by whichever door they came: the bytes are read once more, and looked at as they are."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.core.errors import InvalidInput
from twinkle.server.receiving import check_batch, facts_of, holds_lines
from twinkle.server.state import ArtifactParts, CommonParts
from twinkle.storage.files.reading import stretches_of
from twinkle.storage.files.records import StoredFile, Upload


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
