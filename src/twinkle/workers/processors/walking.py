"""An iterator over a data set or a loader, and where it stands: from there another one goes on with the next row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.dataloader.loader import DataLoader, LoaderPosition
from twinkle.workers.processors.orders import Position


def is_loader(processor_type: str) -> bool:
    """Whether its position is a loader's."""
    return processor_type == "dataloader"


class Walk:
    """Where a processor's iterator stands. Making one does not begin anything: that is for the next call."""

    def __init__(self, made: Any, position: Position) -> None:
        self.loader = made if isinstance(made, DataLoader) else None
        self._made = made
        self.position = position
        self._rows: Iterator[Any] | None = None
        if self.loader is not None:
            self.loader.go_on_from(LoaderPosition(position.consumed, position.in_whole_passes, position.is_passing))

    def begin(self) -> None:
        """Begin a new iteration, wherever the one before stands."""
        if self.loader is not None and self.position.state == "running" and self.position.taken:
            # A pass that was left early is over, whether the loader in memory knows of it or was made anew.
            self.loader.go_on_from(LoaderPosition(self.position.consumed, self.position.in_whole_passes))
        self._rows = self._fresh(0)
        self.position = self.position.model_copy(update={"state": "running", "taken": 0})
        self.stand()

    def next(self) -> Any:
        """The next one.

        Raises:
            StopIteration: There is none.
            InvalidInput: No iteration has begun.
        """
        if self.position.state == "none":
            raise InvalidInput("function", "__next__ before __iter__: begin an iteration first")
        if self.position.state == "ended":
            raise StopIteration
        if self._rows is None:
            self._rows = self._fresh(self.position.taken)
        found = next(self._rows)
        self.position = self.position.model_copy(update={"taken": self.position.taken + 1})
        self.stand(is_passing=True)
        return found

    def note_failure(self, *, is_over: bool) -> None:
        """The iterator has raised. A loader's is over with it; a stream of rows goes on behind the wrong one."""
        if self.position.state != "running":
            return
        if is_over or self.loader is not None:
            self._rows = None
            self.position = self.position.model_copy(update={"state": "ended"})
            self.stand()
        else:
            self.position = self.position.model_copy(update={"taken": self.position.taken + 1})

    def stop(self) -> None:
        """Leave the iteration."""
        self._rows = None
        self.position = self.position.model_copy(update={"state": "none", "taken": 0})

    def after_change(self, processor_type: str) -> Position:
        """Where it stands once its processor was changed: a loader goes on, rows begin anew."""
        if is_loader(processor_type):
            return self.position
        return Position()

    def stand(self, *, is_passing: bool | None = None) -> None:
        """Note where the loader stands."""
        if self.loader is None:
            return
        at = self.loader.position
        self.position = self.position.model_copy(
            update={
                "consumed": at.consumed,
                "in_whole_passes": at.in_whole_passes,
                "is_passing": at.is_passing if is_passing is None else is_passing,
            }
        )

    def _fresh(self, taken: int) -> Iterator[Any]:
        if self.loader is not None:
            return iter(self.loader)
        if hasattr(self._made, "__getitem__"):
            return (self._made[number] for number in range(taken, len(self._made)))
        rows: Iterator[Any] = iter(self._made)
        for _ in range(taken):
            try:
                next(rows)
            except StopIteration:
                break
            except InvalidInput:
                continue
        return rows
