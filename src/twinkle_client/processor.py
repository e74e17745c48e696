"""From rows to what a model takes, at a server. A model there has its own: this one is for looking at batches."""

from __future__ import annotations

from typing import Any

from twinkle_client.connection import Connection
from twinkle_client.remote_data import RemoteData

__all__ = ["InputProcessor"]


class InputProcessor(RemoteData):
    """Pads rows, or lays them in one row without padding.

    Args:
        device_mesh: Not used.
        padding_free: One row for all sequences.
        framework: ``transformers`` is the only one.
        connection: To the server; that of ``init_twinkle_client`` if omitted.
        kwargs: As of ``twinkle.processor.InputProcessor``.
    """

    _type = "processor"

    def __init__(
        self,
        device_mesh: object | None = None,
        padding_free: bool = False,
        framework: str = "transformers",
        *,
        connection: Connection | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = {"padding_free": padding_free, "framework": framework, **kwargs}
        super().__init__("InputProcessor", arguments, connection)

    def __call__(self, inputs: Any, **kwargs: Any) -> dict[str, Any]:
        """The batch of rows, as lists of numbers."""
        batch: dict[str, Any] = self._call("__call__", inputs=inputs, **kwargs)
        return batch
