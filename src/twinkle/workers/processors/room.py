"""Processors in memory: made by their recipes, called, and made anew when what is in memory is not what is asked of.

Lives in a process of its own, which has nothing but memory: whatever it held is made again by whoever comes next.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import structlog

from twinkle.core.errors import ConfigError, InvalidInput, LimitReached, TooLarge, UserError
from twinkle.core.processors import (
    CREATE,
    EXHAUSTED,
    MAX_BATCH_ROWS,
    MAX_CALLS,
    MAX_ROWS,
    Effect,
)
from twinkle.dataset.workspace import Workspace, bytes_below
from twinkle.workers.processors.answers import answer_of
from twinkle.workers.processors.making import Maker, class_of
from twinkle.workers.processors.orders import (
    ITERATOR_EXHAUSTED,
    Done,
    Order,
    Position,
    Recipe,
    Refused,
    Step,
    Unknown,
)
from twinkle.workers.processors.walking import Walk, is_loader

MAX_OBJECTS = 64
_CONSUMED = "consumed_train_samples"
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "set_template": {"template_cls": "template_func"},
}
_BEGINNINGS = ("__iter__", "resume_from_checkpoint", "skip_consumed_samples")

_log = structlog.get_logger()


class Exhausted(UserError):
    """An iterator has no more."""

    code = ITERATOR_EXHAUSTED


class _NotHere(Exception):
    """What is asked of is not in memory, and how to make it was not said."""


@dataclass
class _Live:
    """A processor in memory, which is what ``recipe`` makes."""

    made: Any
    recipe: Recipe
    walk: Walk


class Room:
    """Does calls, one at a time."""

    def __init__(self) -> None:
        self._live: OrderedDict[str, _Live] = OrderedDict()
        self._makers: dict[str, Maker] = {}
        self._folder: Path | None = None
        self._order: Order | None = None

    def perform(self, order: Order) -> Done | Refused | Unknown:
        """Do a call. What the caller can mend is answered; what nobody can is raised."""
        self._settle(order)
        self._order = order
        try:
            recipe, result = self._done(order)
        except _NotHere:
            return Unknown()
        except (UserError, ConfigError) as error:
            return self._refused(order, error)
        return Done(result=result, recipe=recipe, rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    def _settle(self, order: Order) -> None:
        """Work in a folder of its own: relative names of hubs mean nothing there, and files are nobody else's."""
        if self._folder is None:
            Path(order.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=order.folder))
            os.chdir(self._folder)

    def _done(self, order: Order) -> tuple[Recipe, bytes]:
        if order.step.method == CREATE:
            live = self._created(order)
            return live.recipe, answer_of({"processor_id": order.processor})
        live = self._current(order)
        if order.effect is Effect.CHANGES:
            return self._changed(order, live)
        if order.effect is Effect.MOVES:
            answer = self._moved(order.step, live)
        else:
            answer = answer_of({"result": self._asked(order, live)})
        live.recipe = live.recipe.model_copy(update={"position": live.walk.position})
        return live.recipe, answer

    # -- making -------------------------------------------------------------------------------------------------------

    def _created(self, order: Order) -> _Live:
        made = self._instance(order, order.step, order.processor_type, order.class_type, order.uses)
        _check_size(made)
        self._make_room(0)
        recipe = Recipe(steps=(order.step.seq,), uses=dict(order.uses))
        return self._keep(order.processor, _Live(made, recipe, Walk(made, Position())))

    def _instance(self, order: Order, step: Step, processor_type: str, class_type: str, uses: Mapping[str, int]) -> Any:
        arguments = self._arguments(order, step, uses, order.processor)
        if is_loader(processor_type):
            # What is done while rows are read shows nowhere.
            arguments["phase"] = None
        try:
            return class_of(processor_type, class_type)(**arguments)
        except TypeError as error:
            raise InvalidInput("class_type", f"{class_type} cannot be made with these arguments: {error}") from error

    def _arguments(self, order: Order, step: Step, uses: Mapping[str, int], owner: str) -> dict[str, Any]:
        def found(processor: str) -> Any:
            return self._used(order, processor, uses)

        maker = self._makers.setdefault(owner, Maker(self._path, order.object_store, self._make_room))
        return maker.arguments(step.arguments, order.sources, found)

    def _used(self, order: Order, processor: str, uses: Mapping[str, int]) -> Any:
        """Another processor as it was after an operation: the one in memory, if nothing has changed it since."""
        if processor not in uses:
            raise InvalidInput("processor_id", f"there is no {processor} (any more)")
        live = self._live.get(processor)
        if live is not None and live.recipe.steps[-1] <= uses[processor]:
            self._live.move_to_end(processor)
            return live.made
        made = self._remade(order, processor, up_to=uses[processor])
        if live is None:
            script = (order.scripts or {})[processor]
            steps = tuple(step.seq for step in script.steps)
            if steps[-1] <= uses[processor]:
                recipe = Recipe(steps=steps, uses=dict(script.uses))
                self._keep(processor, _Live(made, recipe, Walk(made, Position())))
        return made

    def _remade(self, order: Order, processor: str, *, up_to: int | None = None) -> Any:
        """A processor by its calls, up to a number."""
        if order.scripts is None or processor not in order.scripts:
            raise _NotHere
        script = order.scripts[processor]
        uses = order.recipe.uses if processor == order.processor else script.uses
        made: Any = None
        for step in script.steps:
            if up_to is not None and step.seq > up_to:
                break
            if made is None:
                made = self._instance(order, step, script.processor_type, script.class_type, uses)
            else:
                arguments = self._arguments(order, step, uses, processor)
                getattr(made, step.method)(**_named(script.processor_type, step.method, arguments))
        if made is None:
            raise InvalidInput("processor_id", f"there is no {processor}")
        return made

    def _current(self, order: Order) -> _Live:
        """The processor of an order, as its recipe says; between two iterations it sees what it uses as that is now."""
        recipe = order.recipe
        if recipe.position.state != "running" or order.step.method in _BEGINNINGS:
            recipe = recipe.model_copy(update={"uses": {name: order.uses[name] for name in recipe.uses}})
        live = self._live.get(order.processor)
        if live is None or live.recipe != recipe:
            self._live.pop(order.processor, None)
            made = self._remade(_with_recipe(order, recipe), order.processor)
            live = _Live(made, recipe, Walk(made, recipe.position))
        return self._keep(order.processor, live)

    def _keep(self, processor: str, live: _Live) -> _Live:
        self._live[processor] = live
        self._live.move_to_end(processor)
        while len(self._live) > MAX_OBJECTS:
            name, _ = self._live.popitem(last=False)
            self._makers.pop(name, None)
        return live

    def _make_room(self, num_bytes: int) -> None:
        """Let so many bytes come to what is held on the disk: what the call at hand does not need is put away for it.

        Raises:
            LimitReached: What it needs is more than may be held.
        """
        order = self._order
        assert order is not None, "files are for calls"
        if self._bytes_held() + num_bytes <= order.disk_bytes:
            return
        needed = {order.processor, *order.uses, *(order.scripts or {})}
        for name in self._live.keys() - needed:
            del self._live[name]
            self._makers.pop(name, None)
        gc.collect()
        kept = set[str]().union(*(maker.files for maker in self._makers.values()))
        for place in self._path.iterdir():
            if place.is_dir() and place.name not in kept:
                shutil.rmtree(place, ignore_errors=True)
        held_bytes = self._bytes_held()
        if held_bytes + num_bytes > order.disk_bytes:
            raise LimitReached(
                f"its files and rows would take {held_bytes + num_bytes} bytes on the disk, and {order.disk_bytes} may"
                " be held; make it of fewer rows or drop columns, or ask the operator for more"
                " (TWINKLE_PROCESSOR_DISK_BYTES)"
            )

    def _bytes_held(self) -> int:
        return bytes_below(self._path) + Workspace.bytes_held()

    # -- calling ------------------------------------------------------------------------------------------------------

    def _changed(self, order: Order, live: _Live) -> tuple[Recipe, bytes]:
        if len(live.recipe.steps) >= MAX_CALLS:
            raise LimitReached(f"{MAX_CALLS} calls have changed it, and no more may; make another one")
        # Half a change is none: until it is whole, nobody finds it in memory.
        self._live.pop(order.processor)
        uses = {**live.recipe.uses, **order.uses}
        arguments = self._arguments(order, order.step, uses, order.processor)
        _call(live.made, order.step.method, _named(order.processor_type, order.step.method, arguments))
        _check_size(live.made)
        self._make_room(0)
        self._drop_users(order.processor)
        recipe = Recipe(
            steps=(*live.recipe.steps, order.step.seq), uses=uses, position=live.walk.after_change(order.processor_type)
        )
        self._keep(order.processor, _Live(live.made, recipe, Walk(live.made, recipe.position)))
        return recipe, answer_of({"result": None})

    def _drop_users(self, processor: str) -> None:
        """What is made of it has it in its hands, as it was or is: whoever goes on makes its own."""
        for name in [name for name, live in self._live.items() if processor in live.recipe.uses]:
            del self._live[name]

    def _moved(self, step: Step, live: _Live) -> bytes:
        if step.method == "__iter__":
            live.walk.begin()
            return answer_of({"result": "ok"})
        if step.method != "__next__":
            live.walk.stop()
            _call(live.made, step.method, dict(step.arguments))
            live.walk.stand()
            return answer_of({"result": None})
        try:
            batch = live.walk.next()
        except StopIteration:
            live.walk.note_failure(is_over=True)
            raise Exhausted(EXHAUSTED) from None
        except UserError:
            live.walk.note_failure(is_over=False)
            raise
        answer: dict[str, Any] = {"result": batch}
        if live.walk.loader is not None:
            answer[_CONSUMED] = live.walk.position.consumed
        return answer_of(answer)

    def _asked(self, order: Order, live: _Live) -> Any:
        step = order.step
        arguments = dict(step.arguments)
        if step.method in ("__getitem__", "__len__"):
            return _item(live.made, step.method, arguments)
        for value in arguments.values():
            if isinstance(value, list) and len(value) > MAX_BATCH_ROWS:
                raise TooLarge(f"{len(value)} rows in one call; at most {MAX_BATCH_ROWS} are taken")
        if order.processor_type == "preprocessor":
            return _preprocessed(live.made, arguments.get("rows"))
        if order.processor_type == "processor":
            return _batched(live.made, arguments.get("inputs"))
        return _call(live.made, step.method, arguments)

    # -- refusing -----------------------------------------------------------------------------------------------------

    def _refused(self, order: Order, error: Exception) -> Refused:
        """What was wrong, without our folders; a walk has gone on all the same."""
        live = self._live.get(order.processor)
        recipe = order.recipe
        if live is not None and order.effect is Effect.MOVES:
            recipe = live.recipe = live.recipe.model_copy(update={"position": live.walk.position})
        code = error.code if isinstance(error, UserError) else InvalidInput.code
        return Refused(message=self._without_folders(str(error), order), code=code, recipe=recipe)

    def _without_folders(self, text: str, order: Order) -> str:
        for folder in (str(self._path), order.folder, *order.sources.models.values()):
            text = text.replace(f"{folder}/", "").replace(folder, "")
        return text

    @property
    def _path(self) -> Path:
        assert self._folder is not None, "an order brings the folder"
        return self._folder


@cache
def the_room() -> Room:
    """The one of this process."""
    return Room()


def _with_recipe(order: Order, recipe: Recipe) -> Order:
    return Order(**{**vars(order), "recipe": recipe})


def _named(processor_type: str, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under the names that our methods have for them; clients' classes have several."""
    names = _RENAMED.get(method, {}) if processor_type == "dataset" else {}
    return {names.get(name, name): value for name, value in arguments.items()}


def _call(made: Any, method: str, arguments: Mapping[str, Any]) -> Any:
    """Call what the table lists.

    Raises:
        InvalidInput: The arguments are not those of the method, or not of their types.
    """
    try:
        return getattr(made, method)(**arguments)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        _log.info("processor.call_failed", method=method, error=type(error).__name__)
        raise InvalidInput(method, f"{type(error).__name__}: {str(error)[:500]}") from error


def _item(made: Any, method: str, arguments: Mapping[str, Any]) -> Any:
    if method == "__len__":
        return len(made)
    index = arguments.get("idx", arguments.get("index"))
    if not isinstance(index, int) or isinstance(index, bool) or not -len(made) <= index < len(made):
        raise InvalidInput("idx", f"must be the number of one of {len(made)} rows")
    return made[index]


def _preprocessed(made: Any, rows: Any) -> Any:
    """Rows as they came in: a list of them, or columns."""
    if not isinstance(rows, list):
        return _call(made, "__call__", {"columns": rows})
    return made.map_col_to_row(_call(made, "__call__", {"columns": made.map_row_to_col(rows)}))


def _batched(made: Any, inputs: Any) -> Any:
    batch = _call(made, "__call__", {"rows": inputs})
    return {**batch.model_inputs, "labels": batch.labels}


def _check_size(made: Any) -> None:
    """Refuse a data set that is too large to be kept here.

    Raises:
        LimitReached: It has too many rows.
    """
    for member in getattr(made, "members", ()):
        num_rows = len(member.rows) if hasattr(member.rows, "__len__") else 0
        if num_rows > MAX_ROWS:
            raise LimitReached(f"{member.key} has {num_rows} rows; a data set here has at most {MAX_ROWS}")
