"""The rows of one member of a data set, and what has been or will be done to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.picture_columns import picture_columns
from twinkle.dataset.problems import MOST_PROBLEMS, Place, Problem, WrongRows, problem_of
from twinkle.dataset.source import ORIGIN, PER_SOURCE, Source, one_bar
from twinkle.dataset.steps import Keep, Misused, OverColumns, Row, Step, run_steps
from twinkle.dataset.workspace import Workspace, kept_file, key_of
from twinkle.infra.progress import track

log = event_log()


@dataclass
class Member:
    """``rows`` is a data set of Hugging Face's; ``steps`` are those still to be done, row by row."""

    key: str
    rows: Any
    steps: list[Step] = field(default_factory=list)


class Members:
    """What every data set does to its members: add, name, map, and tell which rows were wrong."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.sources: list[Source] = []
        self._workspace: Workspace | None = None

    def new_file(self, suffix: str) -> Path:
        """A path for rows that have to be written; it goes with this data set."""
        if self._workspace is None:
            self._workspace = Workspace()
        return self._workspace.new_file(suffix)

    def __getstate__(self) -> dict[str, Any]:
        # The folder stays with the process that made it.
        return {**self.__dict__, "_workspace": None}

    def named(self, meta: DatasetMeta | None) -> list[Member]:
        """The member that a script names, or all."""
        if meta is None:
            return self.members
        key = meta.get_id()
        found = [member for member in self.members if member.key == key]
        if not found:
            known = ", ".join(member.key for member in self.members)
            raise InvalidInput("dataset_meta", f"{key} is no member; members are {known}")
        return found

    def place(self, origin: int) -> Place:
        """Where a row with this origin stands."""
        if origin < 0:
            name = self.sources[0].name if len(self.sources) == 1 else "a row made by map"
            return Place(name, None)
        number, row = divmod(origin, PER_SOURCE)
        return self.sources[number].place(row)

    def mapped(self, rows: Any, step: Step, *, load_from_cache_file: bool, **options: Any) -> Any:
        """The rows after a step.

        With ``load_from_cache_file``, they are read from an earlier run if nothing that they depend on has changed.

        Raises:
            WrongRows: Rows that the step refuses, each named.
        """
        fingerprint, file = uuid4().hex, None
        key = key_of(rows._fingerprint, OverColumns(step), options) if load_from_cache_file else None
        if key is not None:
            fingerprint, file = key, kept_file(key)
        elif load_from_cache_file:
            log.warning("dataset.not_kept", step=step.doing, reason="it cannot be pickled, so it has no key to go by")
        if file is None and rows.cache_files:
            file = self.new_file(".arrow")
        several = (options.get("num_proc") or 1) > 1
        try:
            with (
                FileLock(f"{file}.lock") if key is not None else nullcontext(),
                track(step.doing, total=len(rows)) as progress,
                one_bar(several),
            ):
                features = picture_columns(rows, step)
                return rows.map(
                    OverColumns(step, None if several else progress, features),
                    features=features,
                    batched=True,
                    remove_columns=rows.column_names,
                    cache_file_name=None if file is None else str(file),
                    load_from_cache_file=key is not None,
                    new_fingerprint=fingerprint,
                    **options,
                )
        except Misused:
            raise
        except Exception as error:
            self.raise_wrong(rows, [step], error)
            raise

    def filtered(self, rows: Any, step: Keep, **options: Any) -> Any:
        """The rows that a filter keeps."""
        file = str(self.new_file(".arrow")) if rows.cache_files else None
        try:
            with track(step.doing, total=len(rows)) as progress, one_bar(False):
                return rows.filter(
                    _Kept(step, progress.advance if (options.get("num_proc") or 1) == 1 else None),
                    cache_file_name=file,
                    load_from_cache_file=False,
                    new_fingerprint=uuid4().hex,
                    **options,
                )
        except Exception as error:
            self.raise_wrong(rows, [step], error)
            raise

    def raise_wrong(self, rows: Any, steps: Sequence[Step], error: Exception | None) -> None:
        """Find the rows that made a step fail.

        Raises:
            WrongRows: The first hundred of them. If no row fails by itself, nothing is raised.
        """
        problems: list[Problem] = []
        with track("looking for wrong rows", total=len(rows)) as progress:
            for row in rows:
                progress.advance()
                _, problem = self.tried(row, steps)
                if problem is not None:
                    problems.append(problem)
                if len(problems) == MOST_PROBLEMS:
                    break
        if problems:
            is_whole = len(problems) < MOST_PROBLEMS
            raise WrongRows(problems, count=len(problems), doing=steps[-1].doing, is_whole=is_whole) from error

    def tried(self, row: Row, steps: Sequence[Step]) -> tuple[list[Row], Problem | None]:
        """What becomes of a row, or why nothing does."""
        try:
            return list(run_steps(row, steps)), None
        except Exception as error:  # noqa: BLE001 - whatever a preprocessor of the user's raises is said of its row
            return [], problem_of(self.place(row.get(ORIGIN, -1)), error)


class _Kept:
    """A filter as Hugging Face's ``filter`` calls it."""

    def __init__(self, step: Keep, advance: Any) -> None:
        self._step = step
        self._advance = advance

    def __call__(self, row: Row) -> bool:
        if self._advance is not None:
            self._advance(1)
        return bool(self._step.rows({name: value for name, value in row.items() if name != ORIGIN}))
