"""Batches for a loop: this rank's part of each, from exactly where an earlier run stopped."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from twinkle.core.errors import InvalidInput
from twinkle.core.keywords import known_keywords
from twinkle.core.process.events import event_log
from twinkle.dataloader.fetch import Collator, Fetched, RowFetcher, Skipped, handed_out
from twinkle.dataloader.order import RowOrder, num_batches
from twinkle.dataloader.streams import StreamReader
from twinkle.infra.device_mesh import DeviceMesh, current_world_size
from twinkle.infra.progress import NO_PROGRESS, Progress, track
from twinkle.infra.remote import remote_class, remote_function
from twinkle.infra.runtime import mesh_of, runtime, serves_all_ranks
from twinkle.plugin.construct import construct_class
from twinkle.processor import InputProcessor

CONSUMED = "consumed_train_samples"
DEFAULT_RETRIES = 20
PROCESSORS: Mapping[str, Callable[..., InputProcessor]] = {"InputProcessor": InputProcessor}
OURS = ("sampler", "batch_sampler", "generator")
"""What torch's loader would take, and what would break the promise to go on from any row."""

_OF_TORCH = tuple(inspect.signature(torch.utils.data.DataLoader).parameters)
_OWN = ("min_batch_size", "device_mesh", "max_retries", "seed", "phase", "remote_group", "instance_id")

log = event_log()


@dataclass(frozen=True)
class LoaderPosition:
    """Where a loader stands, for whoever makes it anew: also between the beginning of a pass and its first batch.

    ``consumed`` are the rows handed out, ``in_whole_passes`` those of them that a stream gave in passes that are over;
    ``is_passing`` says that the next ``for`` goes on with the pass, rather than begin one.
    """

    consumed: int = 0
    in_whole_passes: int = 0
    is_passing: bool = False


VALUE = remote_function(dispatch="all", collect="first", lazy_collect=False)
"""Whoever asks a loader that is elsewhere wants to know at once."""


@remote_class(execute="first")
class DataLoader:
    """Lists of rows, or what a processor makes of them.

    Where a loop stands is one number, ``get_state()["consumed_train_samples"]``: the rows handed out to all ranks,
    those of the batch in hand included. It does not depend on how many processes read ahead, nor on how many ranks
    there are. A loader of the same data and seed that is told it goes on with the very next row.

    Each ``for`` over the loader is a pass over the rows, in an order of its own if ``shuffle``. A pass that was left
    early is over: the next ``for`` begins the next pass.

    Args:
        dataset: Anything with ``len()`` and rows by number, a stream, or a function that makes one.
        batch_size: Rows of a batch over all data-parallel ranks; each rank gets its part.
        min_batch_size: A last batch with fewer rows is dropped, and not counted by ``len()``. Default: the number of
            data-parallel ranks.
        device_mesh: How ranks share a batch. Default: what ``initialize`` was told, else all ranks on ``dp``.
        max_retries: How many other rows are tried in place of one that raises or is None.
        num_workers: Processes that read ahead. A stream is read in this one.
        shuffle: Take the rows in random order.
        seed: Of that order. Default: that of ``initialize``.
        drop_last: Drop a last batch that is not full.
        collate_fn: Makes a batch of rows, in place of a list.
        phase: What a pass over the rows is called where progress is shown; None shows none.
        remote_group: With ``mode='ray'`` the loader lives on the first worker of this group, where ``dataset`` is
            called if it is a function. There, and in such a script itself, a batch is that of all ranks.
        instance_id: As ``remote_class`` says.
        torch_kwargs: Passed on to torch's loader, like ``prefetch_factor`` and ``pin_memory``.

    Raises:
        InvalidInput: A size does not fit the others, or an argument would break the order.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        device_mesh: DeviceMesh | None = None,
        max_retries: int = DEFAULT_RETRIES,
        num_workers: int = 0,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        phase: str | None = "train",
        remote_group: str | None = None,
        instance_id: str | None = None,
        **torch_kwargs: Any,
    ) -> None:
        self.dataset = dataset() if callable(dataset) else dataset
        self.device_mesh = mesh_of(device_mesh) or DeviceMesh.from_sizes(dp_size=current_world_size())
        self._holds_all_parts = serves_all_ranks()
        if not isinstance(self.dataset, Iterable) and not hasattr(self.dataset, "__getitem__"):
            raise InvalidInput(
                "dataset", f"is {self.dataset!r}; pass a data set, a stream, or a function that makes one"
            )
        self.is_stream = not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__")
        self.batch_size = _rows("batch_size", batch_size, least=1)
        self.min_batch_size = self._least(min_batch_size, drop_last)
        self.max_retries = max_retries
        self.skipped = Skipped()
        self._num_workers = num_workers
        self._seed = runtime().seed if seed is None else seed
        self._shuffles = shuffle
        self._collate = collate_fn
        self._phase = phase
        self._torch_kwargs = known_keywords("DataLoader", torch_kwargs, (*_OWN, *_OF_TORCH))
        self._consumed = 0
        self._in_whole_passes = 0
        self._is_passing = False
        self._check_arguments()

    def _least(self, min_batch_size: int | None, drop_last: bool) -> int:
        ranks = self.device_mesh.data_world_size
        if self.batch_size < ranks:
            raise InvalidInput(
                "batch_size", f"is {self.batch_size} for {ranks} data-parallel ranks; each needs at least one row"
            )
        least = self.batch_size if drop_last else ranks if min_batch_size is None else min_batch_size
        if not 0 <= least <= self.batch_size:
            raise InvalidInput("min_batch_size", f"is {least}; send 0 to batch_size {self.batch_size}")
        return max(least, ranks)

    def _check_arguments(self) -> None:
        for name in OURS:
            if self._torch_kwargs.pop(name, None) is not None:
                raise InvalidInput(name, "cannot be set: the loader keeps the order, so that it can go on from any row")
        if self.is_stream and self._shuffles:
            raise InvalidInput("shuffle", "is True for a stream, whose rows come as they come; shuffle its data set")
        if self.max_retries < 0:
            raise InvalidInput("max_retries", f"is {self.max_retries}; send 0 or more")

    @VALUE
    def set_processor(self, processor_cls: Callable[..., Any] | str, **kwargs: Any) -> None:
        """Make batches of rows: by a processor, its class, its name, or a function of rows."""
        if isinstance(processor_cls, str) or (
            isinstance(processor_cls, type) and issubclass(processor_cls, InputProcessor)
        ):
            kwargs.setdefault("device_mesh", self.device_mesh)
            self._collate = construct_class("processor_cls", processor_cls, InputProcessor, PROCESSORS, **kwargs)
        elif isinstance(processor_cls, type):
            self._collate = processor_cls(**kwargs)
        elif kwargs:
            raise InvalidInput("processor_cls", f"is an object already; {next(iter(kwargs))} comes too late")
        else:
            self._collate = processor_cls

    # Where it stands.

    @VALUE
    def __len__(self) -> int:
        """Batches of a whole pass: as many as come."""
        if self.is_stream:
            raise TypeError("a stream has no length")
        return num_batches(len(self.dataset), self.batch_size, self.min_batch_size)

    @VALUE
    def get_state(self) -> dict[str, int]:
        """Where the loop stands; give it to ``resume_from_checkpoint``."""
        return {CONSUMED: self._consumed}

    @VALUE
    def resume_from_checkpoint(self, consumed_train_samples: int | Mapping[str, int]) -> None:
        """Go on behind so many rows, in the order of the run that counted them.

        The next ``for`` hands out what was left of that run's pass: nothing, if it had ended.
        """
        if isinstance(consumed_train_samples, Mapping):
            if CONSUMED not in consumed_train_samples:
                raise InvalidInput(CONSUMED, "is missing; send what get_state() returned")
            consumed_train_samples = consumed_train_samples[CONSUMED]
        self._consumed = _rows(CONSUMED, consumed_train_samples, least=0)
        self._in_whole_passes = 0
        self._is_passing = self._consumed > 0

    @property
    def position(self) -> LoaderPosition:
        """Where it stands. While a pass is under way, a loader that is to go on with that has to be told so."""
        return LoaderPosition(self._consumed, self._in_whole_passes, self._is_passing)

    @VALUE
    def go_on_from(self, position: LoaderPosition) -> None:
        """Stand where another loader of the same data stood."""
        self._consumed = position.consumed
        self._in_whole_passes = position.in_whole_passes
        self._is_passing = position.is_passing

    @VALUE
    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Leave out so many rows more."""
        self.resume_from_checkpoint(self._consumed + _rows(CONSUMED, consumed_train_samples, least=0))

    # The batches.

    @VALUE
    def __iter__(self) -> Iterator[Any]:
        return self._stream_batches() if self.is_stream else self._batches()

    def _begin(self, num_rows: int) -> tuple[int, int]:
        """Which pass begins or goes on, and at which of its rows."""
        if not self._is_passing:
            # What an earlier pass left over is over with it.
            self._consumed = math.ceil(self._consumed / num_rows) * num_rows
            return self._consumed // num_rows, 0
        number = (self._consumed - 1) // num_rows
        return number, self._consumed - number * num_rows

    def _batches(self) -> Iterator[Any]:
        if not len(self.dataset):
            return
        order = RowOrder(len(self.dataset), self._seed, self._shuffles)
        number, start = self._begin(order.num_rows)
        self._is_passing = False
        batches = order.batches(number, start, self.batch_size, self.min_batch_size)
        if start and not batches:
            log.info("dataloader.pass_was_over", consumed_train_samples=self._consumed)
        loader = torch.utils.data.DataLoader(
            RowFetcher(self.dataset, order, number, self.max_retries),
            batch_sampler=[self._part(batch.tolist()) for batch in batches],
            collate_fn=Collator(self._collate),
            num_workers=self._num_workers,
            # Its own: a loader that draws from the script's random numbers changes what the script computes.
            generator=torch.Generator().manual_seed(self._seed + number),
            **self._torch_kwargs,
        )
        fetched: Fetched
        with self._shown(len(batches)) as progress:
            for batch, fetched in zip(batches, loader, strict=True):
                self._consumed += len(batch)
                for row in fetched.skipped:
                    self.skipped.add(row)
                handed_out(self.dataset, fetched.rows)
                yield fetched.batch
                progress.advance()
        self._consumed = (number + 1) * order.num_rows

    def _stream_batches(self) -> Iterator[Any]:
        reader = StreamReader(self.dataset, self.max_retries, self.skipped)
        # How long a stream is shows at its end: a pass that was left early is forgotten, and begun anew.
        skip = self._consumed - self._in_whole_passes if self._is_passing else 0
        self._consumed, self._is_passing = self._in_whole_passes + skip, False
        waiting: list[Any] = []
        with self._shown(None) as progress:
            for row in reader.rows(skip):
                waiting.append(row)
                if len(waiting) == self.batch_size:
                    yield self._handed_out(waiting, reader)
                    progress.advance()
                    waiting = []
        if len(waiting) >= self.min_batch_size:
            yield self._handed_out(waiting, reader)
        else:
            self._consumed += len(waiting)
        self._in_whole_passes = self._consumed

    def _part(self, rows: list[Any]) -> list[Any]:
        return rows if self._holds_all_parts else self.device_mesh.slice_data(rows)

    def _shown(self, num_batches: int | None) -> AbstractContextManager[Progress]:
        """The progress of a pass: what the script does with a batch is part of the phase."""
        return NO_PROGRESS if self._phase is None else track(self._phase, total=num_batches, unit="batches")

    def _handed_out(self, rows: list[Any], reader: StreamReader) -> Any:
        self._consumed += len(rows)
        self._in_whole_passes += reader.take_whole_passes()
        part = self._part(rows)
        handed_out(self.dataset, part)
        return part if self._collate is None else self._collate(part)


def _rows(field: str, value: object, *, least: int) -> int:
    """A number of rows that a script gave; numpy's and tensors' are taken as well."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidInput(field, f"is {value!r}; send a whole number of rows") from error
    if number < least:
        raise InvalidInput(field, f"is {number}; send {least} or more")
    return number
