"""Exports in the jobs process: where they are written, who writes them, and how they get to where they are to be."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from pydantic import SecretStr

from twinkle.core.adapter import Checkpoint, StoredFile
from twinkle.core.clock import Clock
from twinkle.core.errors import ConfigError, NotFound, StorageUnavailable
from twinkle.core.file_names import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from twinkle.core.job import JobFailed
from twinkle.core.settings import Settings
from twinkle.hub.caches import published_id
from twinkle.hub.model_card import ModelCard
from twinkle.hub.model_path import resolve_model_id
from twinkle.jobs.exporting import ExportedFile, ExportOrder
from twinkle.server.access.sealing import SECRET_FIELDS, Sealer
from twinkle.storage.blobs import BlobStore
from twinkle.storage.stores import Stores
from twinkle.wire.bodies.jobs_export import BUCKETS, HUBS, ExportSpec
from twinkle.workers.jobs.export.kept_files import KeptFiles
from twinkle.workers.jobs.export.requests import (
    ExportOutline,
    ExportRequest,
    outline_of,
    sha256_of,
    take_step,
    verify_form,
)
from twinkle.workers.jobs.export.targets import check_allowed, push_to_hub, put_in_bucket, put_in_folder

P = ParamSpec("P")
T = TypeVar("T")

EXPORTS = "exports"
"""The folder in which exports are written, below the home folder."""


class Heavy(Protocol):
    """Runs functions in a process of their own."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function makes of its arguments."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExportParts:
    """What exports need."""

    settings: Settings
    stores: Stores
    blobs: BlobStore
    clock: Clock
    sealer: Sealer
    heavy: Heavy


class ExportTools:
    """The part of the tools that exports."""

    def __init__(self, parts: ExportParts) -> None:
        self._parts = parts

    async def open_export(self, order: ExportOrder) -> OpenExport:
        """See :meth:`twinkle.jobs.tools.Tools.open_export`."""
        if importlib.util.find_spec("gguf") is None:
            raise JobFailed(
                "not_offered", "this service exports nothing; its operator has to pip install 'twinkle-queue[export]'"
            )
        parts = self._parts
        spec = ExportSpec.model_validate(order.spec)
        if spec.to is not None:
            check_allowed(spec.to, tenant=order.tenant, allowed=parts.settings.export_targets)
        checkpoint = await asyncio.to_thread(_find, parts.stores, order, spec)
        if checkpoint.config.is_whole_model:
            raise JobFailed(
                "cannot_be_exported",
                f"{spec.checkpoint} is a whole model: its files are those of transformers already; download them",
                field="checkpoint",
            )
        folder = parts.settings.home.absolute() / EXPORTS / order.job
        await asyncio.to_thread(_sweep, parts.stores, folder.parent)
        base = await asyncio.to_thread(_base_folder, parts.stores, checkpoint.config.base_model)
        await asyncio.to_thread(_bring, parts.blobs, checkpoint, folder / "adapter")
        request = ExportRequest(
            base=str(base),
            adapter=str(folder / "adapter"),
            folder=str(folder),
            forms=tuple(spec.forms),
            name=spec.title or checkpoint.name,
            memory_bytes=parts.settings.export_memory_bytes,
            compares_logits=spec.verify == "logits",
        )
        try:
            outline = await parts.heavy.run(outline_of, request)
        except ConfigError as error:
            raise JobFailed("cannot_be_exported", error.message, field="forms") from error
        if spec.to is None:
            await asyncio.to_thread(_kept(parts).check_room, order.tenant, outline.size_bytes)
        return OpenExport(parts, order, spec, checkpoint, request, outline)


class OpenExport:
    """See :class:`twinkle.jobs.exporting.ExportWork`."""

    def __init__(
        self,
        parts: ExportParts,
        order: ExportOrder,
        spec: ExportSpec,
        checkpoint: Checkpoint,
        request: ExportRequest,
        outline: ExportOutline,
    ) -> None:
        self._parts = parts
        self._order = order
        self._spec = spec
        self._checkpoint = checkpoint
        self._request = request
        self._outline = outline
        self._folder = Path(request.folder)

    @property
    def content(self) -> str:
        return self._checkpoint.content

    @property
    def facts(self) -> Mapping[str, str]:
        return {"base_model": self._checkpoint.config.base_model, "architecture": self._outline.architecture}

    @property
    def steps(self) -> tuple[str, ...]:
        return self._outline.steps

    @property
    def size_bytes(self) -> int:
        return self._outline.size_bytes

    async def take(self, step: str) -> list[ExportedFile]:
        written = await self._parts.heavy.run(take_step, self._request, step)
        return [ExportedFile(**asdict(file)) for file in written]

    async def verify(self, form: str) -> dict[str, float]:
        try:
            return await self._parts.heavy.run(verify_form, self._request, form)  # type: ignore[arg-type]
        except StorageUnavailable as error:
            # Another attempt would write the same: what lies there goes, and a person has to look.
            raise JobFailed("not_verified", error.message) from error

    async def publish(self, file: ExportedFile) -> ExportedFile:
        target, source = self._spec.to, self._folder / file.path
        name = file.path if len(self._spec.forms) > 1 else file.path.partition("/")[2]
        if target is None:
            file_id = await asyncio.to_thread(
                _kept(self._parts).keep,
                self._order.job,
                self._order.tenant,
                name,
                source,
                file.sha256,
                keep_s=self._spec.keep_s,
            )
            return ExportedFile(path=name, size_bytes=file.size_bytes, sha256=file.sha256, file=file_id)
        if target.startswith(BUCKETS):
            credentials = self._credentials()
            await asyncio.to_thread(put_in_bucket, target, name, source, credentials)
        elif not target.startswith(HUBS):
            await asyncio.to_thread(put_in_folder, target, name, source)
        return ExportedFile(path=name, size_bytes=file.size_bytes, sha256=file.sha256)

    async def finish(self, verification: Mapping[str, Mapping[str, float]]) -> str | None:
        target = self._spec.to
        if target is None or not target.startswith(HUBS):
            return target
        assert self._spec.hub_token is not None, "checked with the spec"
        token = self._parts.sealer.open(self._spec.hub_token, self._order.tenant)
        [form] = self._spec.forms
        folder = str(self._folder / ("gguf" if form == "ollama" else form))
        card = self._card(verification)
        return await asyncio.to_thread(
            push_to_hub, target, folder, token=token, is_private=self._spec.private, card=card
        )

    async def clear(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _credentials(self) -> dict[str, SecretStr] | None:
        given = self._spec.credentials
        if given is None:
            return None
        values: dict[str, str] = given.model_dump(exclude_none=True)
        return {
            name: self._parts.sealer.open(text, self._order.tenant) if name in SECRET_FIELDS else SecretStr(text)
            for name, text in values.items()
        }

    def _card(self, verification: Mapping[str, Mapping[str, float]]) -> ModelCard:
        config = self._checkpoint.config
        lines = [
            "## Lineage",
            "",
            f"- checkpoint: `{self._checkpoint.path}` after operation {self._checkpoint.seq}",
            f"- LoRA: rank {config.rank}, alpha {config.alpha:g}, seed {config.seed}",
            f"- form: {', '.join(self._spec.forms)}",
            "",
            "## Verification",
            "",
            *(
                f"- {form}: {name.replace('_', ' ')} {value:.3g}"
                for form, figures in verification.items()
                for name, value in figures.items()
            ),
        ]
        base = published_id(config.base_model)
        return ModelCard(base=None if Path(base).is_absolute() else base, text="\n".join(lines))


def _kept(parts: ExportParts) -> KeptFiles:
    return KeptFiles(parts.stores, parts.blobs, parts.clock)


def _find(stores: Stores, order: ExportOrder, spec: ExportSpec) -> Checkpoint:
    try:
        if order.content is not None:
            checkpoint = stores.checkpoints.content(order.content)
        else:
            checkpoint = stores.checkpoints.find(spec.checkpoint, tenant=order.tenant)
    except NotFound as error:
        raise JobFailed("not_found", error.message, field="checkpoint") from error
    if checkpoint.is_encrypted:
        raise JobFailed(
            "cannot_be_exported",
            f"{checkpoint.path} is encrypted to a key that only its owner has; download it",
            field="checkpoint",
        )
    return checkpoint


def _base_folder(stores: Stores, base_model: str) -> Path:
    """Where the base model's weights are on this machine."""
    for mesh in stores.meshes.all():
        said = mesh.capabilities
        if said is not None and said.base_model == base_model and said.tokenizer_path is not None:
            folder = Path(said.tokenizer_path)
            if (folder / "config.json").is_file():
                return folder
    try:
        return Path(resolve_model_id(base_model))
    except ConfigError as error:
        raise JobFailed(
            "base_model_not_here", f"the base model is not where jobs run: {error.message}", field="checkpoint"
        ) from error


def _sweep(stores: Stores, folder: Path) -> None:
    """Remove what exports have left that ended elsewhere: cancelled while paused, or run by another host."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    for name in set(names) - stores.jobs.unended(names):
        shutil.rmtree(folder / name, ignore_errors=True)


def _bring(blobs: BlobStore, checkpoint: Checkpoint, folder: Path) -> None:
    """Put a checkpoint's adapter into a folder, unless it lies there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE):
        file = checkpoint.files.get(name)
        if file is None:
            raise JobFailed("cannot_be_exported", f"{checkpoint.path} holds no {name}", field="checkpoint")
        path = folder / name
        if not path.is_file() or sha256_of(path) != file.sha256:
            path.write_bytes(_read(blobs, file))


def _read(blobs: BlobStore, file: StoredFile) -> bytes:
    try:
        return blobs.get(file.key)
    except KeyError:
        raise JobFailed("not_found", "the checkpoint was deleted", field="checkpoint") from None
