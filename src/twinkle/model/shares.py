"""Which rank computes which datums of a job, and what it tells the others about them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from twinkle.core.errors import OutOfMemory, UserError
from twinkle.model.training import Datum


def shares_of(data: Sequence[Datum], num_ranks: int) -> list[range]:
    """The datums of each rank: stretches of about as many tokens each, some of them empty.

    A function of the job alone, so that neither company nor replay changes a sum. Which rank has the first stretch is
    drawn from the tokens: small jobs would otherwise all be the same rank's.
    """
    sizes = np.array([datum.tokens.size for datum in data], dtype=np.int64)
    middles = 2 * np.cumsum(sizes) - sizes
    # Monotone, since the middles are: the middle of a datum says in which stretch of the tokens it lies.
    stretch_of_datum = middles * num_ranks // max(2 * int(sizes.sum()), 1)
    starts = np.searchsorted(stretch_of_datum, np.arange(num_ranks + 1)).tolist()
    first_rank = zlib.crc32(data[0].tokens.astype(np.int64).tobytes()) % num_ranks if num_ranks > 1 else 0
    stretches = [range(start, end) for start, end in itertools.pairwise(starts)]
    return [stretches[(rank - first_rank) % num_ranks] for rank in range(num_ranks)]


@dataclass(frozen=True)
class FailureReport:
    """An error in a form that survives the way to another process, whatever its class."""

    kind: Literal["user", "out_of_memory", "other"]
    message: str

    @classmethod
    def of(cls, error: Exception) -> FailureReport:
        """What there is to say about an error."""
        if isinstance(error, UserError):
            return cls("user", error.message)
        if isinstance(error, OutOfMemory):
            return cls("out_of_memory", error.message)
        return cls("other", f"{type(error).__name__}: {error}")

    def to_error(self) -> Exception:
        """The error again."""
        if self.kind == "user":
            return UserError(self.message)
        return OutOfMemory(self.message) if self.kind == "out_of_memory" else RuntimeError(self.message)


@dataclass(frozen=True, eq=False)
class ShareReport:
    """How one rank's share of a job ended: logprobs, losses and metrics of its datums, or why not."""

    failure: FailureReport | None
    logprobs: tuple[np.ndarray, ...]
    losses: tuple[float, ...]
    metrics: tuple[Mapping[str, float], ...]
