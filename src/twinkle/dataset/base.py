"""What all data sets have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Self

from twinkle.core.errors import InvalidInput
from twinkle.core.process.lazy import lazy_attributes
from twinkle.dataset.member import Member, Members
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.open import open_member
from twinkle.dataset.problems import Problem
from twinkle.dataset.report import Report, report_of
from twinkle.dataset.saving import Format, RowWriter, format_of
from twinkle.dataset.source import ORIGIN
from twinkle.dataset.steps import Encodable, Encode, Keep, Preprocess, Row, Step, known_options, resolve
from twinkle.infra.device_mesh import current_rank
from twinkle.infra.progress import track
from twinkle.plugin.construct import construct_class
from twinkle.plugin.registry import Registry
from twinkle.preprocessor import DataFilter, Preprocessor
from twinkle.template import Template

if TYPE_CHECKING:
    from twinkle.dataset.dataset import Dataset

__all__ = ["Dataset", "DatasetBase", "DatasetMeta"]

# Scripts import it from here; it stands above this module.
__getattr__ = lazy_attributes(__name__, {"Dataset": "twinkle.dataset.dataset"})


class DatasetBase(Members):
    """What data sets have in common: their members, a template, and the calls by which scripts say what to do to rows.

    Args:
        dataset_meta: The first member; more come with ``add_dataset``.
        streaming: Whether rows are read while they are taken; each class does one of both.
        num_proc: Processes that read files.
        revision: Of a hub's data set.
        skip_unreadable: Leave out the lines of JSONL files that are no rows, and tell them in the report.
        remote_group: For scripts that run on Ray; has no meaning in one process.
        device_mesh: Not used; a data set holds the rows of all ranks.
        instance_id: Not used.
        load_kwargs: Passed on to the reader of files, or to the hub.
    """

    _streams = False

    def __init__(
        self,
        dataset_meta: DatasetMeta | str | None = None,
        *,
        streaming: bool | None = None,
        num_proc: int | None = None,
        revision: str | None = None,
        skip_unreadable: bool = False,
        remote_group: str | None = None,
        device_mesh: object | None = None,
        instance_id: str | None = None,
        **load_kwargs: Any,
    ) -> None:
        super().__init__()
        if streaming is not None and streaming != self._streams:
            right = "Dataset" if self._streams else "IterableDataset"
            raise InvalidInput("streaming", f"is {streaming}; use {right}")
        self.template: Template | None = None
        self.is_mixed = False
        self.unreadable: list[Problem] = []
        self._opening = {"num_proc": num_proc, "revision": revision, "skip_unreadable": skip_unreadable, **load_kwargs}
        self._writer: RowWriter | None = None
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)

    # The members.

    def add_dataset(self, dataset_meta: DatasetMeta | str, **load_kwargs: Any) -> None:
        """Add a member.

        Raises:
            WrongRows: Lines of its files cannot be read; the first hundred are named.
        """
        if self.is_mixed:
            raise InvalidInput("dataset_meta", "comes too late: the members are mixed already")
        meta = DatasetMeta(dataset_meta) if isinstance(dataset_meta, str) else dataset_meta
        if any(member.key == meta.get_id() for member in self.members):
            raise InvalidInput("dataset_meta", f"{meta.get_id()} is a member already")
        options = {**self._opening, **load_kwargs}
        opened = open_member(meta, len(self.sources), self.new_file, streaming=self._streams, **options)
        self.sources.append(opened.source)
        self.unreadable += opened.problems
        self.members.append(Member(meta.get_id(), opened.rows))

    @abstractmethod
    def mix_dataset(self, interleave: bool = True) -> None:
        """Make one of all members."""

    @abstractmethod
    def _do(self, step: Step, member: Member, *, load_from_cache_file: bool, **options: Any) -> None:
        """Do a step to a member, now or when its rows are taken."""

    @abstractmethod
    def _keep(self, step: Keep, member: Member, **options: Any) -> None:
        """Leave out rows of a member."""

    @abstractmethod
    def unrecorded(self) -> Iterator[Row]:
        """All rows, without their being written by ``save_as(mode="training")``."""

    @property
    def only(self) -> Member:
        """The one member there is, or what all were mixed to."""
        if len(self.members) != 1:
            raise InvalidInput("dataset", f"has {len(self.members)} members; call mix_dataset() first")
        return self.members[0]

    # What is done to them.

    def set_template(self, template_func: Template | type[Template] | str, **kwargs: Any) -> None:
        """What encodes conversations: a template, its class, or its name with the arguments of its constructor."""
        known = Registry("twinkle.templates")
        self.template = construct_class("template_func", template_func, Template, known, **kwargs)

    def map(
        self,
        preprocess_func: Callable[..., Any] | type | str,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        *,
        remove_columns: str | Sequence[str] | None = None,
        load_from_cache_file: bool = False,
        batched: bool = True,
        **map_kwargs: Any,
    ) -> None:
        """Replace columns by what a preprocessor makes of them; it gets a dict of columns and returns one.

        Args:
            preprocess_func: An object, a class, or a name of ``twinkle.preprocessor``.
            dataset_meta: The member to map; without it all are.
            init_args: Of the class's constructor.
            remove_columns: Columns to drop; the others are kept.
            load_from_cache_file: Take the rows of an earlier run if neither rows nor code have changed since.
            batched: Always so.
            map_kwargs: Passed on to ``map`` of Hugging Face's, like ``num_proc`` and ``batch_size``; those that have
                nothing to set here are named in the log.

        Raises:
            WrongRows: Rows that the preprocessor refuses, each named.
        """
        if not batched:
            raise InvalidInput("batched", "is False; a preprocessor gets columns")
        options = known_options("map", map_kwargs)
        removed = (remove_columns,) if isinstance(remove_columns, str) else tuple(remove_columns or ())
        step = Preprocess(resolve("preprocess_func", preprocess_func, init_args, Preprocessor), removed)
        for member in self.named(dataset_meta):
            self._do(step, member, load_from_cache_file=load_from_cache_file, **options)

    def filter(
        self,
        filter_func: Callable[..., Any] | type | str,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        *,
        load_from_cache_file: bool = False,
        batched: bool = False,
        **filter_kwargs: Any,
    ) -> None:
        """Keep the rows of which a filter says yes; it gets one row.

        Args:
            filter_func: An object, a class, or a function.
            dataset_meta: The member to filter; without it all are.
            init_args: Of the class's constructor.
            load_from_cache_file: Has no effect: what a filter says is never kept.
            batched: Must be False.
            filter_kwargs: Passed on to ``filter`` of Hugging Face's, like ``num_proc``.

        Raises:
            WrongRows: Rows that the filter refuses, each named.
        """
        if batched:
            raise InvalidInput("batched", "is True; a filter gets one row")
        options = known_options("filter", filter_kwargs)
        step = Keep(resolve("filter_func", filter_func, init_args, DataFilter))
        for member in self.named(dataset_meta):
            self._keep(step, member, **options)

    def encode(
        self,
        add_generation_prompt: bool = False,
        *,
        load_from_cache_file: bool = False,
        batched: bool = True,
        **map_kwargs: Any,
    ) -> None:
        """Make tokens of conversations with the template; rows that have none are left out.

        Raises:
            WrongRows: Rows that cannot be encoded: the first hundred, each with file, line, field and reason.
        """
        options = known_options("encode", map_kwargs)
        step = Encode(self.needed_template(), add_generation_prompt)
        for member in self.members:
            self._do(step, member, load_from_cache_file=load_from_cache_file, **options)

    def check(self, *, load_from_cache_file: bool = False, batched: bool = False, **filter_kwargs: Any) -> None:
        """Keep the rows that the template can encode."""
        options = known_options("check", filter_kwargs)
        step = Keep(Encodable(self.needed_template()))
        for member in self.members:
            self._keep(step, member, **options)

    def cast_column(self, column: str, decode: bool = True) -> None:
        """Whether a column of pictures, sound or films is decoded; as bytes, rows are mapped quickly."""
        for member in self.members:
            features = member.rows.features or {}
            if column not in features:
                raise InvalidInput("column", f"{column!r} is not known; columns are {', '.join(self.column_names)}")
            feature = features[column]
            if not hasattr(feature, "decode"):
                raise InvalidInput("column", f"{column!r} holds {feature}, which is not decoded")
            member.rows = member.rows.cast_column(column, type(feature)(decode=decode))

    def needed_template(self) -> Template:
        """The template."""
        if self.template is None:
            raise InvalidInput("template", "is not set; call set_template first")
        return self.template

    # What they are.

    @property
    def column_names(self) -> list[str]:
        """The columns of the rows."""
        return [name for name in self.members[0].rows.column_names or () if name != ORIGIN] if self.members else []

    def report(self, limit: int | None = None) -> Report:
        """What is wrong with the rows, how long they are, what truncation would cut, and which tokens train.

        Before ``encode`` the template is tried on each row; nothing is changed.

        Args:
            limit: Look at so many rows only.
        """
        return report_of(self, self.template, self.unreadable, limit=limit)

    def undone(self) -> Iterator[tuple[Row, Sequence[Step]]]:
        """All rows, with their origin, and what is still to be done to them."""
        for member in self.members:
            for row in member.rows:
                yield row, member.steps

    def num_undone(self) -> int | None:
        """How many rows ``undone`` has; None for a stream."""
        return None if self._streams else sum(len(member.rows) for member in self.members)

    # What is kept of them.

    def save_as(
        self, output_path: str, format: Format | None = None, batch_size: int = 1000, mode: str = "immediate"
    ) -> Self:
        """Write the rows to a file: at once, or (``mode="training"``) each as it is taken.

        Args:
            output_path: A file; on other ranks than the first, one of theirs beside it.
            format: ``jsonl``, ``json``, ``csv`` or ``parquet``; by default what the file's name says.
            batch_size: Rows that are written together.
            mode: ``immediate`` or ``training``; after the latter call ``flush_save``.
        """
        kind = format_of(output_path, format)
        if mode not in ("immediate", "training"):
            raise InvalidInput("mode", f"is {mode!r}; use 'immediate' or 'training'")
        writer = RowWriter(output_path, kind, batch_size=batch_size, rank=current_rank())
        if mode == "training":
            self._writer = writer
        elif current_rank() == 0:
            total = len(self) if isinstance(self, Sized) else None
            with writer, track("save", total=total) as progress:
                for row in self.unrecorded():
                    writer.write(row)
                    progress.advance()
        return self

    def flush_save(self) -> None:
        """End what ``save_as(mode="training")`` began: all rows taken so far are in the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def record(self, rows: Sequence[Row]) -> None:
        """Write rows that were taken, if they are to be saved."""
        if self._writer is not None:
            for row in rows:
                self._writer.write(row)

    def __getstate__(self) -> dict[str, Any]:
        # Rows taken in another process are written by the one that hands them out.
        return {**super().__getstate__(), "_writer": None}
