"""All that plans need of the training library, each part by whoever knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from twinkle.core.clock import Clock
from twinkle.core.errors import InvalidInput
from twinkle.core.job import JobFailed
from twinkle.core.settings import Settings
from twinkle.grading.grade import RewardRequest
from twinkle.grading.rewards import RewardProcesses
from twinkle.jobs.data import DataRequest, DataRow, PreparedData
from twinkle.jobs.exporting import ExportOrder, ExportWork
from twinkle.jobs.script_tools import RunningScript, ScriptRequest
from twinkle.server.access.sealing import Sealer
from twinkle.server.access.signing import Signer, secret_of
from twinkle.server.model_texts import Texts
from twinkle.storage.blobs import BlobStore
from twinkle.storage.stores import Stores
from twinkle.workers.jobs.data_tools import DataTools
from twinkle.workers.jobs.export.work import ExportParts, ExportTools
from twinkle.workers.jobs.heavy import HeavyWork
from twinkle.workers.jobs.models import capabilities_of, digest_of_vocabulary, tokenizer_folder
from twinkle.workers.jobs.scripts import Scripts


class Toolbox:
    """See :class:`twinkle.jobs.tools.Tools`. Lives on one event loop."""

    def __init__(self, settings: Settings, stores: Stores, blobs: BlobStore, clock: Clock) -> None:
        self._stores = stores
        self._heavy = HeavyWork()
        self._data = DataTools(
            stores, blobs, object_store=settings.resolved_object_store, heavy=self._heavy, clock=clock
        )
        # Of its own: an export takes minutes, for which nobody's data are to wait.
        self._exporting = HeavyWork()
        sealer = Sealer(Signer(secret_of(settings)))
        self._exports = ExportTools(
            ExportParts(
                settings=settings, stores=stores, blobs=blobs, clock=clock, sealer=sealer, heavy=self._exporting
            )
        )
        self._rewards = RewardProcesses()
        self._scripts = Scripts(settings, stores.tenants, clock)
        self._texts = Texts(clock)

    async def close(self) -> None:
        """End all processes."""
        await self._rewards.close()
        await asyncio.to_thread(self._heavy.stop)
        await asyncio.to_thread(self._exporting.stop)

    async def prepare_data(self, request: DataRequest) -> PreparedData:
        """See :meth:`twinkle.jobs.tools.Tools.prepare_data`."""
        return await self._data.prepare_data(request)

    async def read_rows(self, prepared: PreparedData, numbers: list[int]) -> list[DataRow]:
        """See :meth:`twinkle.jobs.tools.Tools.read_rows`."""
        return await self._data.read_rows(prepared, numbers)

    async def grade(self, tenant: str, request: RewardRequest) -> float:
        """See :meth:`twinkle.jobs.tools.Tools.grade`."""
        return await self._rewards.grade(tenant, request)

    async def decode(self, model: str, answers: Sequence[Sequence[int]]) -> list[str]:
        """See :meth:`twinkle.jobs.tools.Tools.decode`."""
        return await asyncio.to_thread(self._decode, model, answers)

    async def vocabulary(self, model: str) -> str:
        """See :meth:`twinkle.jobs.tools.Tools.vocabulary`."""
        return await asyncio.to_thread(self._vocabulary, model)

    async def open_export(self, order: ExportOrder) -> ExportWork:
        """See :meth:`twinkle.jobs.tools.Tools.open_export`."""
        return await self._exports.open_export(order)

    def run_script(self, request: ScriptRequest) -> AbstractAsyncContextManager[RunningScript]:
        """See :meth:`twinkle.jobs.script_tools.ScriptTools.run_script`."""
        return self._scripts.run_script(request)

    async def forget_script(self, job: str) -> None:
        """See :meth:`twinkle.jobs.script_tools.ScriptTools.forget_script`."""
        await self._scripts.forget_script(job)

    def _decode(self, model: str, answers: Sequence[Sequence[int]]) -> list[str]:
        texts = self._texts.of(self._folder(model))
        if texts is None:
            raise _no_tokenizer(model)
        return [texts.decode(tokens) for tokens in answers]

    def _vocabulary(self, model: str) -> str:
        folder = self._folder(model)
        if self._texts.of(folder) is None:
            raise _no_tokenizer(model)
        return digest_of_vocabulary(Path(folder))

    def _folder(self, model: str) -> str:
        try:
            return str(tokenizer_folder(capabilities_of(self._stores.meshes, model)))
        except InvalidInput as error:
            raise JobFailed("model_not_served", error.message, field="model") from error


def _no_tokenizer(model: str) -> JobFailed:
    return JobFailed("no_tokenizer", f"the tokenizer of {model} cannot be read by this jobs worker", field="model")
