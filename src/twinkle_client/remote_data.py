"""What data sets, loaders and processors at a server have in common: made there, called there, ended there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import quote

from twinkle_client.connection import Connection, current
from twinkle_client.errors import BadAnswer, Expired, NotFound

_ROUTE = "/processor/twinkle"
_EXHAUSTED = "Iterator exhausted"
_CODE = "exhausted"


class RemoteData:
    """Something at a server, under an id that may stand for it in the arguments of others."""

    _type = ""

    def __init__(self, class_type: str, arguments: Mapping[str, object], connection: Connection | None) -> None:
        self.connection = current() if connection is None else connection
        body = {"processor_type": self._type, "class_type": class_type, **arguments}
        answer = self.connection.call(f"{_ROUTE}/create", body)
        processor_id = answer.get("processor_id") if isinstance(answer, dict) else None
        if not isinstance(processor_id, str):
            raise BadAnswer(f"{class_type}: the server answered no processor_id")
        self.processor_id = processor_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.processor_id}>"

    def close(self) -> None:
        """End it at the server, where there is room for another one then. Without this it ends with its session."""
        try:
            self.connection.ask("DELETE", f"{_ROUTE}/{quote(self.processor_id, safe=':')}")
        except (NotFound, Expired):
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer_to(self, function: str, *, timeout_s: float | None = None, **arguments: object) -> dict[str, Any]:
        """What the server answers to a call.

        Raises:
            StopIteration: An iterator has no more.
            TwinkleError: The call was refused or failed.
        """
        body = {"processor_id": self.processor_id, "function": function, **arguments}
        try:
            answer = self.connection.call(f"{_ROUTE}/call", body, timeout_s=timeout_s)
        except Expired as error:
            if error.code == _CODE or error.message == _EXHAUSTED:
                raise StopIteration from None
            raise
        if not isinstance(answer, dict):
            raise BadAnswer(f"{function}: the server answered no result")
        return answer

    def _call(self, function: str, *, timeout_s: float | None = None, **arguments: object) -> Any:
        return self.answer_to(function, timeout_s=timeout_s, **arguments).get("result")
