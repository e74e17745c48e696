"""Batches of a data set at a server: the next one is fetched while the script is at the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from twinkle_client.arguments import component_name
from twinkle_client.connection import Connection
from twinkle_client.dataset import _Rows
from twinkle_client.errors import InvalidInput
from twinkle_client.remote_data import RemoteData

_CONSUMED = "consumed_train_samples"


class DataLoader(RemoteData):
    """Lists of rows.

    Each ``for`` over it is a pass over the rows; a pass that was left early is over. Where the loop stands is one
    number, ``get_state()["consumed_train_samples"]``: the rows of the batches that this process was given, not of the
    one that is fetched ahead. A loader of the same data and seed that is told it goes on with the very next row.

    Args:
        dataset: A data set at the server, or a function that makes one.
        prefetch: Whether the next batch is fetched ahead, one at most.
        connection: To the server; that of the data set if omitted.
        settings: As of ``twinkle.dataloader.DataLoader``: ``batch_size``, ``shuffle``, ``seed``, ``drop_last``, ...
    """

    _type = "dataloader"

    def __init__(
        self,
        dataset: _Rows | Callable[[], _Rows],
        *,
        prefetch: bool = True,
        connection: Connection | None = None,
        **settings: Any,
    ) -> None:
        made = dataset if isinstance(dataset, RemoteData) else dataset() if callable(dataset) else dataset
        if not isinstance(made, RemoteData):
            raise InvalidInput(
                "dataset",
                f"is a {type(made).__name__} of this process; take it from twinkle_client.dataset, or the loader from"
                " twinkle.dataloader",
            )
        self.dataset = made
        super().__init__("DataLoader", {"dataset": made, **settings}, connection or made.connection)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="twinkle-batches") if prefetch else None
        self._ahead: Future[dict[str, Any] | None] | None = None
        self._consumed: int | None = None

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def set_processor(self, processor_cls: object, **kwargs: Any) -> None:
        """Make batches of rows: by the name of a processor, or by one at the server."""
        self._settle()
        named = (
            processor_cls if isinstance(processor_cls, RemoteData) else component_name("processor_cls", processor_cls)
        )
        self._call("set_processor", processor_cls=named, **kwargs)

    # Where it stands.

    def get_state(self) -> dict[str, int]:
        """Where the loop stands; give it to ``resume_from_checkpoint``."""
        if self._consumed is None:
            self._settle()
            self._consumed = int(self._call("get_state")[_CONSUMED])
        return {_CONSUMED: self._consumed}

    def resume_from_checkpoint(self, consumed_train_samples: int | Mapping[str, int]) -> None:
        """Go on behind so many rows, in the order of the run that counted them."""
        if isinstance(consumed_train_samples, Mapping):
            consumed_train_samples = consumed_train_samples[_CONSUMED]
        self._settle()
        self._consumed = None
        self._call("resume_from_checkpoint", consumed_train_samples=int(consumed_train_samples))

    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Leave out so many rows more."""
        self.resume_from_checkpoint(self.get_state()[_CONSUMED] + consumed_train_samples)

    # The batches.

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        self._call("__iter__")
        return self

    def __next__(self) -> Any:
        ahead, self._ahead = self._ahead, None
        answer = self._fetch() if ahead is None else ahead.result()
        if answer is None:
            self._consumed = None
            raise StopIteration
        batch = answer.get("result")
        known = answer.get(_CONSUMED)
        self._consumed = int(known) if known is not None else self._counted(batch)
        if self._threads is not None:
            self._ahead = self._threads.submit(self._fetch)
        return batch

    def close(self) -> None:
        """See :meth:`RemoteData.close`."""
        self._settle()
        if self._threads is not None:
            self._threads.shutdown()
        super().close()

    def _fetch(self) -> dict[str, Any] | None:
        """The next batch; an exception of a thread's cannot be a StopIteration."""
        try:
            return self.answer_to("__next__")
        except StopIteration:
            return None

    def _counted(self, batch: Any) -> int | None:
        """Of a server that does not count the rows it hands out."""
        return None if self._consumed is None or not isinstance(batch, list) else self._consumed + len(batch)

    def _settle(self) -> None:
        """Wait for what is fetched ahead, and forget it: it belongs to a pass that is over."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.exception()
