"""What a client's own loss may take in one operation: the units that are counted for each datum, summed over them."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.errors import UserError

WORK_PER_OPERATION = 1 << 26
WORK_PER_DATUM_OF_ALL = 1 << 18
WORK_PER_TOKEN_OF_ALL = 1 << 12
"""On average. One datum may take far more (``loss/graph_run.py``), a thousand of them may not."""


class TooMuchWork(UserError):
    """A client's own loss takes more than its operation may."""


@dataclass
class OperationWork:
    """What the loss of one operation has taken so far, on this rank.

    ``limit`` is a function of the operation alone, so that whether it is passed is the same on any number of ranks;
    None for an operation that is done again, which was accepted once.
    """

    limit: int | None
    spent: int = 0

    @classmethod
    def of(cls, *, num_datums: int, num_tokens: int) -> OperationWork:
        """The account of an operation with so many datums."""
        return cls(WORK_PER_OPERATION + WORK_PER_DATUM_OF_ALL * num_datums + WORK_PER_TOKEN_OF_ALL * num_tokens)

    def refusal(self, spent: int) -> TooMuchWork | None:
        """Why it is not to go on, having taken so much."""
        if self.limit is None or spent <= self.limit:
            return None
        return TooMuchWork(
            f"the custom loss takes more than {self.limit} operations on cells over all datums of this operation, which"
            " is its limit; nothing of it was applied. Make the loss smaller, send fewer datums at once, or run it on"
            " the client"
        )
