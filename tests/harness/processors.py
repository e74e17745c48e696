"""Processors without a queue: orders made as the worker makes them, done in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from twinkle.core.processors import CREATE, REFERENCES, Effect, accepted_arguments, is_processor_id, method_of, offer_of
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.files.records import FilePiece
from twinkle.workers.processors.orders import (
    ITERATOR_EXHAUSTED,
    Done,
    FileSource,
    Order,
    Recipe,
    Refused,
    Script,
    Sources,
    Step,
    Unknown,
)
from twinkle.workers.processors.room import Room


class Desk:
    def __init__(
        self,
        folder: Path,
        *,
        models: dict[str, str] | None = None,
        folders: tuple[str, ...] = (),
        disk_bytes: int = 2**30,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.disk_bytes = disk_bytes
        self._home = os.getcwd()
        self._room = Room()
        self._sources = Sources(files={}, models=models or {}, folders=folders)
        self._types: dict[str, tuple[str, str]] = {}
        self._steps: dict[str, list[Step]] = {}
        self._recipes: dict[str, Recipe] = {}
        self._blobs = open_blob_store(str(folder / "objects"))

    def file(self, name: str, content: str) -> str:
        key = f"files/2026-01-01/{name}"
        self._blobs.put(key, content.encode())
        file_id = f"file-{len(self._sources.files)}"
        piece = FilePiece(key=key, size_bytes=len(content.encode()))
        self._sources = Sources(
            files={**self._sources.files, file_id: FileSource(name=name, pieces=(piece,))}, models=self._sources.models
        )
        return file_id

    def forget_everything(self) -> None:
        self._room = Room()

    def create(self, processor_type: str, class_type: str, **arguments: Any) -> str:
        processor, answer = self._create(processor_type, class_type, arguments)
        assert isinstance(answer, Done), answer
        return processor

    def refused_creation(self, processor_type: str, class_type: str, **arguments: Any) -> Refused:
        _, answer = self._create(processor_type, class_type, arguments)
        assert isinstance(answer, Refused), answer
        return answer

    def call(self, processor: str, method: str, **arguments: Any) -> Any:
        return self.answer(processor, method, **arguments)["result"]

    def answer(self, processor: str, method: str, **arguments: Any) -> Any:
        answer = self._call(processor, method, arguments)
        assert isinstance(answer, Done), answer
        return orjson.loads(answer.result)

    def refused(self, processor: str, method: str, **arguments: Any) -> Refused:
        answer = self._call(processor, method, arguments)
        assert isinstance(answer, Refused), answer
        return answer

    def next(self, processor: str) -> Any:
        answer = self._call(processor, "__next__", {})
        if isinstance(answer, Refused):
            assert answer.code == ITERATOR_EXHAUSTED, answer
            return None
        return orjson.loads(answer.result)["result"]

    def _create(self, processor_type: str, class_type: str, arguments: dict[str, Any]) -> tuple[str, Done | Refused]:
        processor = f"pid:{uuid4().hex}"
        self._types[processor] = processor_type, class_type
        self._steps[processor] = []
        self._recipes[processor] = Recipe()
        taken = accepted_arguments(arguments, offer_of(processor_type, class_type).takes)
        return processor, self._perform(processor, CREATE, taken, Effect.CHANGES)

    def _call(self, processor: str, function: str, arguments: dict[str, Any]) -> Done | Refused:
        method = method_of(offer_of(*self._types[processor]), function)
        return self._perform(processor, function, accepted_arguments(arguments, method.takes), method.effect)

    def _perform(self, processor: str, method: str, arguments: dict[str, Any], effect: Effect) -> Done | Refused:
        step = Step(seq=len(self._steps[processor]), method=method, arguments=arguments)
        self._steps[processor].append(step)
        recipe = self._recipes[processor]
        named = {value for name, value in arguments.items() if name in REFERENCES and is_processor_id(value)}
        uses = {name: len(self._steps[name]) - 1 for name in {*named, *recipe.uses}}
        order = Order(
            processor=processor,
            processor_type=self._types[processor][0],
            class_type=self._types[processor][1],
            step=step,
            effect=effect,
            recipe=recipe,
            uses=uses,
            sources=self._sources,
            object_store=str(self._folder / "objects"),
            folder=str(self._folder / "room"),
            disk_bytes=self.disk_bytes,
        )
        try:
            answer = self._room.perform(order)
            if isinstance(answer, Unknown):
                answer = self._room.perform(Order(**{**vars(order), "scripts": self._scripts()}))
        finally:
            os.chdir(self._home)
        assert not isinstance(answer, Unknown)
        self._recipes[processor] = answer.recipe
        return answer

    def _scripts(self) -> dict[str, Script]:
        return {
            name: Script(
                processor_type=self._types[name][0],
                class_type=self._types[name][1],
                steps=tuple(step for step in self._steps[name] if step.seq in self._recipes[name].steps),
                uses=self._recipes[name].uses,
            )
            for name in self._recipes
        }
