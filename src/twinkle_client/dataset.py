"""Data sets at a server, under the names that the library has for them; only the import path changes.

Rows come from a hub, from files of this machine (which are uploaded once) or from memory; what is done to them is done
there, by classes that are named. Code of one's own cannot be sent: map such rows here, with ``twinkle.dataset``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from twinkle_client.arguments import component_name, component_parts
from twinkle_client.connection import Connection, current
from twinkle_client.remote_data import RemoteData
from twinkle_client.same_names import attributes_of
from twinkle_client.uploads import UPLOADS

if TYPE_CHECKING:
    from twinkle.dataset.meta import DatasetMeta

__all__ = ["Dataset", "DatasetMeta", "IterableDataset", "IterablePackingDataset", "LazyDataset", "PackingDataset"]

_ENCODE_S = 600


class _Rows(RemoteData):
    """What data sets of all kinds can be told to do."""

    _type = "dataset"

    def __init__(
        self, dataset_meta: DatasetMeta | str | None = None, *, connection: Connection | None = None, **kwargs: Any
    ) -> None:
        """Make it at the server.

        Args:
            dataset_meta: Its rows; more come with :meth:`add_dataset`.
            connection: To the server; that of ``init_twinkle_client`` if omitted.
            kwargs: As of the class of the library.
        """
        connection = current() if connection is None else connection
        meta = UPLOADS.meta(dataset_meta, connection)
        super().__init__(type(self).__name__, {"dataset_meta": meta, **kwargs}, connection)

    def add_dataset(self, dataset_meta: DatasetMeta | str, **kwargs: Any) -> None:
        """Add a member."""
        self._call("add_dataset", dataset_meta=UPLOADS.meta(dataset_meta, self.connection), **kwargs)

    def set_template(self, template_func: object, **kwargs: Any) -> None:
        """What encodes conversations: its name, with the arguments of its constructor."""
        self._call("set_template", template_func=_named("template_func", template_func), **kwargs)

    def map(
        self,
        preprocess_func: object,
        dataset_meta: DatasetMeta | str | None = None,
        init_args: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Replace columns by what a preprocessor makes of them; it is given by its name, or is one of the library's."""
        self._call(
            "map",
            dataset_meta=UPLOADS.meta(dataset_meta, self.connection),
            **_made("preprocess_func", preprocess_func, init_args),
            **kwargs,
        )

    def filter(
        self,
        filter_func: object,
        dataset_meta: DatasetMeta | str | None = None,
        init_args: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the rows of which a filter says yes."""
        self._call(
            "filter",
            dataset_meta=UPLOADS.meta(dataset_meta, self.connection),
            **_made("filter_func", filter_func, init_args),
            **kwargs,
        )

    def mix_dataset(self, interleave: bool = True) -> None:
        """Make one of all members."""
        self._call("mix_dataset", interleave=interleave)

    def encode(self, add_generation_prompt: bool = False, timeout: float | None = _ENCODE_S, **kwargs: Any) -> None:
        """Make tokens of conversations with the template; the server goes on if this takes longer than ``timeout``."""
        self._call("encode", timeout_s=timeout, add_generation_prompt=add_generation_prompt, **kwargs)

    def check(self, **kwargs: Any) -> None:
        """Keep the rows that the template can encode."""
        self._call("check", **kwargs)

    def cast_column(self, column: str, decode: bool = True) -> None:
        """Whether a column of pictures, sound or films is decoded."""
        self._call("cast_column", column=column, decode=decode)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows one by one, each fetched when it is asked for; a loader brings many at once."""
        self._call("__iter__")
        while True:
            try:
                row = self._call("__next__")
            except StopIteration:
                return
            yield row


class Dataset(_Rows):
    """Rows by number, mapped and encoded when they are told to be."""

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row: dict[str, Any] = self._call("__getitem__", idx=int(index))
        return row


class LazyDataset(Dataset):
    """Rows by number, mapped and encoded when they are taken: for pictures."""


class PackingDataset(Dataset):
    """Rows that are packed: call ``encode()``, then ``pack_dataset()``."""

    def pack_dataset(self) -> None:
        """Lay encoded rows together."""
        self._call("pack_dataset")


class IterableDataset(_Rows):
    """A stream of rows."""


class IterablePackingDataset(IterableDataset):
    """A stream of packed rows."""

    def pack_dataset(self) -> None:
        """Nothing that would not happen anyhow: rows are packed as they come."""
        self._call("pack_dataset")


def _named(field: str, component: object) -> object:
    """A component by its name, or one at the server."""
    return component if isinstance(component, RemoteData) else component_name(field, component)


def _made(field: str, component: object, init_args: dict[str, Any] | None) -> dict[str, Any]:
    """A component by its name and what it is made with, or one at the server."""
    if isinstance(component, RemoteData):
        return {field: component, "init_args": init_args}
    name, given = component_parts(field, component)
    return {field: name, "init_args": given if init_args is None else init_args}


_load = attributes_of("twinkle.dataset")


def __getattr__(name: str) -> object:
    if name != "DatasetMeta":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(name)
