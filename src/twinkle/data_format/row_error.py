"""What is wrong with a row, told so that its author can find it."""

from __future__ import annotations

from typing import Any

from twinkle.core.errors import InvalidInput


class RowError(InvalidInput):
    """A row that cannot be encoded.

    ``field`` is the place within the row (``messages[2].content``), ``message_number`` the message's if it lies in one,
    ``reason`` what is wrong there, ``row`` the number of the row in its batch where it came in one.
    """

    def __init__(self, field: str, reason: str, *, message_number: int | None = None, row: int | None = None) -> None:
        super().__init__(field if row is None else f"row {row}: {field}", reason)
        self.field = field
        self.reason = reason
        self.message_number = message_number
        self.row = row

    def at_row(self, row: int) -> RowError:
        """The same of a row with a number."""
        return RowError(self.field, self.reason, message_number=self.message_number, row=row)

    def within(self, name: str) -> RowError:
        """The same of a conversation that is a field of a row."""
        return RowError(f"{name}.{self.field}", self.reason, message_number=self.message_number, row=self.row)

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross from the processes of a data set's ``map``."""
        return _restore, (self.field, self.reason, self.message_number, self.row)


def _restore(field: str, reason: str, message_number: int | None, row: int | None) -> RowError:
    return RowError(field, reason, message_number=message_number, row=row)
