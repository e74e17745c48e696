"""In the place of a sampler on a mesh that only trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from twinkle.core.errors import InvalidInput
from twinkle.sampler.request import Adapter, SampleRequest
from twinkle.sampler.sequence import Stretch
from twinkle.sampler.stepped import Outcome, SteppedSampler


class NoSampler(SteppedSampler):
    """Takes no request, so that nothing is ever under way."""

    @property
    def has_work(self) -> bool:
        """Never."""
        return False

    @property
    def num_requests(self) -> int:
        """None."""
        return 0

    def add(self, request: SampleRequest) -> None:
        """Refuse it; raises ``InvalidInput``."""
        raise _refusal()

    def cancel(self, key: str) -> None:
        """Nothing is under way."""

    def step(self) -> list[Outcome]:
        """Nothing ends."""
        return []

    def drawn_so_far(self, key: str, known: Sequence[int]) -> list[Stretch]:
        """Nothing was drawn."""
        return []

    def load_adapter(self, files: Mapping[str, bytes]) -> Adapter:
        """Refuse it; raises ``InvalidInput``."""
        raise _refusal()

    def forget_prompts(self) -> None:
        """None is kept."""

    def weight_names(self) -> list[str]:
        """It has no weights."""
        return []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse them; raises ``InvalidInput``."""
        raise _refusal()

    def shutdown(self) -> None:
        """It holds nothing."""


def _refusal() -> InvalidInput:
    return InvalidInput("base_model", "this mesh only trains; sample on another one of its model")
