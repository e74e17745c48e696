"""Claimed operations as orders: what a call refers to is looked up here, where the journal is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import structlog

from twinkle.core.errors import ConfigError, InvalidInput, NotFound, UserError
from twinkle.core.model_names import plain_model_name
from twinkle.core.operation import Claim
from twinkle.core.processors import (
    CREATE,
    REFERENCES,
    Effect,
    accepted_arguments,
    is_processor_id,
    method_of,
    offer_of,
)
from twinkle.storage.blobs import BlobStore
from twinkle.storage.payloads import read_payload
from twinkle.storage.processors.processors import Processor
from twinkle.storage.stores import Stores
from twinkle.wire.calls import decode_call
from twinkle.wire.dataset_meta import FIELD, read_dataset_meta
from twinkle.workers.jobs.models import capabilities_of, tokenizer_folder
from twinkle.workers.processors.orders import FileSource, Order, Recipe, Script, Sources, Step

_log = structlog.get_logger()


class Assembler:
    """Makes orders. Blocks; called from threads."""

    def __init__(
        self,
        stores: Stores,
        blobs: BlobStore,
        *,
        object_store: str,
        folder: str,
        disk_bytes: int,
        folders: tuple[str, ...],
    ) -> None:
        """Take the stores.

        Args:
            stores: What is known of processors, files and models.
            blobs: Where large payloads lie.
            object_store: The same, for other processes.
            folder: Where those put files.
            disk_bytes: What one of them may hold there.
            folders: Those of this machine that clients may read.
        """
        self._stores = stores
        self._blobs = blobs
        self._object_store = object_store
        self._folder = folder
        self._disk_bytes = disk_bytes
        self._folders = folders

    def order(self, claim: Claim) -> Order:
        """What a claim asks for.

        Raises:
            UserError: The processor has ended or was never made, or it may not be called so.
            StorageUnavailable: The payload could not be read.
        """
        processor = self._stores.processors.find(claim.lane, claim.tenant)
        call = decode_call(read_payload(self._blobs, claim.payload))
        offer = offer_of(processor.processor_type, processor.class_type)
        if call.method == CREATE:
            effect, takes = Effect.CHANGES, offer.takes
        else:
            method = method_of(offer, call.method)
            effect, takes = method.effect, method.takes
        recipe = _recipe_of(processor)
        if call.method != CREATE and not recipe.steps:
            raise NotFound(f"{claim.lane} could not be made; the answer to its creation says why")
        step = Step(seq=claim.seq, method=call.method, arguments=accepted_arguments(call.arguments, takes))
        named = {value for name, value in step.arguments.items() if name in REFERENCES and is_processor_id(value)}
        return Order(
            processor=claim.lane,
            processor_type=processor.processor_type,
            class_type=processor.class_type,
            step=step,
            effect=effect,
            recipe=recipe,
            uses=self._standing({*named, *recipe.uses}, claim),
            sources=self._sources([step], claim.tenant),
            object_store=self._object_store,
            folder=self._folder,
            disk_bytes=self._disk_bytes,
        )

    def with_scripts(self, order: Order, claim: Claim) -> Order:
        """The same order with all that it takes to make what it is about anew.

        Raises:
            TwinkleError: The journal does not hold it any more.
            StorageUnavailable: It could not be read.
        """
        scripts: dict[str, Script] = {}
        wanted = [claim.lane, *order.uses]
        while wanted:
            name = wanted.pop()
            if name not in scripts:
                scripts[name] = self._script(name, claim.tenant)
                wanted += scripts[name].uses
        steps = [order.step, *(step for script in scripts.values() for step in script.steps)]
        return replace(order, scripts=scripts, sources=self._sources(steps, claim.tenant))

    def _script(self, processor: str, tenant: str) -> Script:
        found = self._stores.processors.find(processor, tenant)
        recipe = _recipe_of(found)
        return Script(
            processor_type=found.processor_type,
            class_type=found.class_type,
            steps=tuple(self._steps(found, recipe)),
            uses=recipe.uses,
        )

    def _steps(self, processor: Processor, recipe: Recipe) -> Iterable[Step]:
        if not recipe.steps:
            return
        offer = offer_of(processor.processor_type, processor.class_type)
        for operation in self._stores.journal.some_of_history(processor.id, recipe.steps):
            call = decode_call(read_payload(self._blobs, operation.payload))
            takes = offer.takes if call.method == CREATE else method_of(offer, call.method).takes
            yield Step(seq=operation.seq, method=call.method, arguments=accepted_arguments(call.arguments, takes))

    def _standing(self, processors: set[str], claim: Claim) -> dict[str, int]:
        """How far the processors that are referred to have come; those that have ended are missing.

        Raises:
            NotFound: One is not the tenant's, or has ended.
            InvalidInput: One refers to itself.
        """
        if claim.lane in processors:
            raise InvalidInput("processor_id", "refers to itself")
        found = self._stores.processors.some(sorted(processors), claim.tenant)
        for name in processors:
            if name not in found or not _recipe_of(found[name]).steps:
                raise NotFound(f"no data set, loader or other processor {name!r}")
        return {name: processor.applied_seq for name, processor in found.items()}

    def _sources(self, steps: Iterable[Step], tenant: str) -> Sources:
        files: dict[str, FileSource] = {}
        models: dict[str, str] = {}
        for step in steps:
            self._note_file(step.arguments, tenant, files)
            self._note_model(step.arguments.get("model_id"), models)
        return Sources(files=files, models=models, folders=self._folders)

    def _note_file(self, arguments: Mapping[str, Any], tenant: str, files: dict[str, FileSource]) -> None:
        meta = arguments.get(FIELD)
        file_id = None if meta is None else read_dataset_meta(meta).file_id
        if file_id is not None and file_id not in files:
            file = self._stores.files.find(file_id, tenant)
            files[file_id] = FileSource(name=file.name, pieces=tuple(self._stores.files.pieces(file)))

    def _note_model(self, model: object, models: dict[str, str]) -> None:
        """Where the tokenizer of a served model lies; any other is the hubs' business."""
        if not isinstance(model, str):
            return
        name = plain_model_name(model)
        try:
            models[name] = str(tokenizer_folder(capabilities_of(self._stores.meshes, name)))
        except (UserError, ConfigError) as error:
            _log.debug("processor.model_not_served", model=name, error=error.message)


def _recipe_of(processor: Processor) -> Recipe:
    return Recipe() if processor.recipe is None else Recipe.model_validate_json(processor.recipe)
