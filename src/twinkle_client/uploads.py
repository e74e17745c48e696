"""Rows that lie on this machine, brought to the server before a data set is made of them there."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from twinkle.client.client import Client
from twinkle_client.connection import Connection
from twinkle_client.errors import InvalidInput

KEEP_S = 7 * 24 * 3600
"""How long an uploaded file stays: a data set that is rebuilt reads it again."""
_PURPOSE = "user_data"
_API = "/api/v1"


class Uploads:
    """The files of this process that a server has: each is brought once, and not at all where its bytes are known."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Connection, dict[tuple[str, int, int], str]] = WeakKeyDictionary()

    def meta(self, meta: Any, connection: Connection) -> Any:
        """A description of rows as the server can read it: files of this machine by the ids they have there.

        Raises:
            InvalidInput: It names a folder, or brings rows that cannot be sent.
        """
        if meta is None:
            return None
        if isinstance(meta, str):
            return self._place(meta, connection)
        if not dataclasses.is_dataclass(meta) or isinstance(meta, type):
            raise InvalidInput(
                "dataset_meta", f"is a {type(meta).__name__}; send a DatasetMeta or the id of a data set"
            )
        sent = copy.copy(meta)
        named: Any = sent
        if named.data is not None:
            named.data = _rows(named.data)
        elif named.dataset_id:
            named.dataset_id = self._place(named.dataset_id, connection)
        return sent

    def _place(self, dataset_id: str, connection: Connection) -> str:
        path = Path(dataset_id.rpartition("://")[2]).expanduser()
        # A server without futures is not one of ours: it reads paths of its own, and takes no files.
        if not connection.has_futures or not path.exists():
            return dataset_id
        if path.is_dir():
            raise InvalidInput("dataset_id", f"{path} is a folder; name one of its files, or add each as a data set")
        stat = path.stat()
        key = (str(path.resolve()), stat.st_mtime_ns, stat.st_size)
        known = self._known.setdefault(connection, {})
        if key not in known:
            endpoint = connection.endpoint
            with Client(endpoint.url.removesuffix(_API), endpoint.api_key.get_secret_value()) as client:
                known[key] = client.files.upload(path, purpose=_PURPOSE, expires_after_s=KEEP_S).id
        return known[key]


def _rows(data: Any) -> Any:
    """Rows in memory as plain values: those of a function that yields them, and of Hugging Face's data sets."""
    made = data() if isinstance(data, Callable) and not isinstance(data, type) else data  # type: ignore[arg-type]
    if isinstance(made, Mapping):
        return {name: list(column) for name, column in made.items()}
    try:
        return [dict(row) for row in made]
    except (TypeError, ValueError) as error:
        raise InvalidInput("data", f"is {type(data).__name__}; send a list of rows or a dict of columns") from error


UPLOADS = Uploads()
