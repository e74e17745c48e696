"""Prepared data for plans: found if it lies ready, made by a heavy process if not, its rows read by number."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidInput, NotFound, TransientError, TwinkleError, UserError
from twinkle.core.ids import new_id
from twinkle.core.job import JobFailed
from twinkle.jobs.data import DataRequest, DataRow, DataRows, PreparedData
from twinkle.storage.blobs import PREPARED, BlobStore, day_of
from twinkle.storage.files.prepared import NewPreparedData, shard_key
from twinkle.storage.files.records import StoredFile
from twinkle.storage.stores import Stores
from twinkle.workers.jobs.data_work import DataOutcome, DataWork, prepare
from twinkle.workers.jobs.heavy import HeavyWork
from twinkle.workers.jobs.models import capabilities_of, digest_of_tokenizer, tokenizer_folder

T = TypeVar("T")

_VERSION = 1
"""Of what is made of the same rows; a change of it makes everything anew."""
_OPEN_READERS = 16


class DataTools:
    """The part of the tools that knows data. Lives on one event loop; what blocks is done by threads."""

    def __init__(self, stores: Stores, blobs: BlobStore, *, object_store: str, heavy: HeavyWork, clock: Clock) -> None:
        """Take the stores.

        Args:
            stores: Files, prepared rows and meshes.
            blobs: The object store.
            object_store: Its URL, for other processes.
            heavy: What encodes.
            clock: What day it is.
        """
        self._stores = stores
        self._blobs = blobs
        self._object_store = object_store
        self._heavy = heavy
        self._clock = clock
        self._running: dict[tuple[str, str], asyncio.Task[PreparedData]] = {}
        self._readers: OrderedDict[str, DataRows] = OrderedDict()
        self._lock = asyncio.Lock()

    async def prepare_data(self, request: DataRequest) -> PreparedData:
        """See :meth:`twinkle.jobs.tools.Tools.prepare_data`. Who asks for the same at the same time waits for it."""
        work = await _told(asyncio.to_thread(self._work_of, request))
        found = await _told(asyncio.to_thread(self._stores.prepared_rows.find, request.tenant, work.digest))
        if found is not None:
            return PreparedData.from_json(json.loads(found))
        name = (request.tenant, work.digest)
        task = self._running.get(name)
        if task is None:
            # Not the job's own: whoever else asks needs it too when this one is cancelled.
            task = self._running[name] = asyncio.create_task(self._made(work))
            task.add_done_callback(lambda _: self._running.pop(name, None))
        return await asyncio.shield(task)

    async def read_rows(self, prepared: PreparedData, numbers: list[int]) -> list[DataRow]:
        """See :meth:`twinkle.jobs.tools.Tools.read_rows`."""
        async with self._lock:
            reader = self._readers.setdefault(prepared.folder, DataRows(self._blobs, prepared))
            self._readers.move_to_end(prepared.folder)
            while len(self._readers) > _OPEN_READERS:
                self._readers.popitem(last=False)
            try:
                return await _told(asyncio.to_thread(reader.rows, numbers))
            except KeyError as error:
                message = "the prepared rows are gone, since nobody asked for them in a long time; they are made again"
                raise JobFailed("prepared_data_gone", message, is_transient=True) from error

    async def _made(self, work: DataWork) -> PreparedData:
        outcome = await _told(self._heavy.run(prepare, work))
        if outcome.prepared is None:
            keys = [shard_key(work.folder, number) for number in range(outcome.num_shards)]
            await _told(asyncio.to_thread(self._stores.prepared_rows.give_up, keys))
            raise JobFailed("invalid_data", _words(outcome), field="data", details=outcome.details())
        new = NewPreparedData(
            tenant=work.request.tenant,
            digest=work.digest,
            folder=work.folder,
            num_shards=outcome.num_shards,
            size_bytes=outcome.size_bytes,
            description=json.dumps(outcome.prepared.to_json()),
        )
        limits = (await _told(asyncio.to_thread(self._stores.tenants.account, work.request.tenant))).limits
        kept = await _told(asyncio.to_thread(self._stores.prepared_rows.add, new, max_bytes=limits.max_files_bytes))
        return PreparedData.from_json(json.loads(kept))

    def _work_of(self, request: DataRequest) -> DataWork:
        capabilities = capabilities_of(self._stores.meshes, request.model)
        model_path = tokenizer_folder(capabilities)
        file: StoredFile | None = None
        if request.file is not None:
            try:
                file = self._stores.files.find(request.file, request.tenant)
            except NotFound as error:
                raise JobFailed("file_not_found", error.message, field="file") from error
        facts = [
            _VERSION,
            request.dataset if file is None else file.sha256,
            None if file is None else Path(file.name).suffix.lower(),
            request.options(),
            capabilities.max_context_length,
            capabilities.vocab_size,
            digest_of_tokenizer(model_path),
        ]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return DataWork(
            request=request,
            digest=digest,
            # New each time: what ends and is made again must not lie where the old is deleted.
            folder=f"{PREPARED}{day_of(self._clock.now())}/{new_id()}",
            object_store=self._object_store,
            model_path=str(model_path),
            max_length=capabilities.max_context_length,
            vocab_size=capabilities.vocab_size,
            file_name="" if file is None else file.name,
            pieces=() if file is None else tuple(self._stores.files.pieces(file)),
        )


async def _told(call: Awaitable[T]) -> T:
    """What comes of a call; our own errors are said as jobs say them."""
    try:
        return await call
    except UserError as error:
        field = error.field if isinstance(error, InvalidInput) else None
        raise JobFailed(error.code, error.message, field=field) from error
    except TwinkleError as error:
        raise JobFailed(error.code, error.message, is_transient=isinstance(error, TransientError)) from error


def _words(outcome: DataOutcome) -> str:
    first = "; ".join(str(problem) for problem in outcome.problems[:3])
    rows = "1 row" if outcome.num_wrong == 1 else f"{outcome.num_wrong} rows"
    return f"{rows} of {outcome.num_rows} cannot be used: {first}{'; ...' if outcome.num_wrong > 3 else ''}"
