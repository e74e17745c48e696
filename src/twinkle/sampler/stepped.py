"""What the service samples with, and what the samplers of scripts stand on: a state machine over many requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch

from twinkle.sampler.request import Adapter, SampleRequest, SampleResult
from twinkle.sampler.sequence import Stretch

Outcome = SampleResult | tuple[str, Exception]


class SteppedSampler(ABC):
    """Owned and stepped by one thread.

    Every backend keeps these promises: a request is ended by exactly one outcome, unless it is cancelled; one request's
    failure is its own; a request is sampled with the weights of its adapter or not at all, and with nobody else's.
    """

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Requests added and not yet ended."""

    @abstractmethod
    def add(self, request: SampleRequest) -> None:
        """Queues a request.

        Raises:
            InvalidInput: A field is outside its limits, or this backend cannot serve it.
            Conflict: A request with this key has not ended yet.
        """

    @abstractmethod
    def cancel(self, key: str) -> None:
        """Forgets a request and frees what it holds; one that has ended already, or never was, is no error."""

    @abstractmethod
    def step(self) -> list[Outcome]:
        """Advances everything under way; returns the requests that ended with it, each in its own way.

        Raises:
            OutOfMemory: The device has no room. Cancel something, or step again.
        """

    @abstractmethod
    def drawn_so_far(self, key: str, known: Sequence[int]) -> list[Stretch]:
        """Returns what a request under way has drawn, of each sample ``i`` what lies beyond ``known[i]`` tokens.

        A sample that was begun anew and has fewer tokens is returned from its start. Computes nothing.
        """

    @abstractmethod
    def load_adapter(self, files: Mapping[str, bytes]) -> Adapter:
        """Returns an adapter from the files of a PEFT directory.

        Raises:
            InvalidInput: The files do not fit the base model.
        """

    @abstractmethod
    def forget_prompts(self) -> None:
        """Drops what is kept of prompts computed before; requests under way keep theirs."""

    @abstractmethod
    def weight_names(self) -> list[str]:
        """What the base model's weights are called, as transformers has them."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies weights over the base model's, and forgets prompts computed with the old ones.

        Raises:
            InvalidInput: A name or a shape is not the base model's; weights before it are copied already.
            RuntimeError: Requests are under way.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Frees what it holds. It cannot be used after that."""
