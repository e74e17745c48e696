"""How far a processor is: the recipe by which it can be made anew, committed with the outcome that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.storage.database import Transaction, placeholders


@dataclass(frozen=True, kw_only=True)
class ProcessorProgress:
    """The recipe of a processor's state after operation ``seq``, as JSON; ``uses`` are those it is made of."""

    processor: str
    seq: int
    recipe: str
    uses: Sequence[str] = ()

    def insert(self, transaction: Transaction, now: float) -> None:
        """Put it in the place of the one before, and note that what it is made of is in use."""
        transaction.execute(
            "UPDATE processor SET recipe = ?, applied_seq = ?, used_at = ? WHERE id = ? AND ended_at IS NULL",
            (self.recipe, self.seq, now, self.processor),
        )
        if self.uses:
            transaction.execute(
                f"UPDATE processor SET used_at = ? WHERE id IN ({placeholders(self.uses)}) AND ended_at IS NULL",
                (now, *self.uses),
            )
