"""What answers conversations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle.data_format.sampling import SamplingParams

Message = dict[str, Any]


class API(ABC):
    """Answers conversations. One of one's own brings ``__call__``."""

    @abstractmethod
    def __call__(
        self, trajectory: Mapping[str, Any], sampling_params: SamplingParams, **overrides: Any
    ) -> Message | list[Message]:
        """The assistant's message, or as many as samples are asked for where these are several."""
