"""The ends of a sync: what a model and a sampler offer to whoever carries weights from one to the other.

Their methods are marked for groups of devices: a manager calls all ranks of a group at once, and each does its part.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol

import safetensors.torch
import torch

from twinkle.checkpoint_engine.base import CheckpointEngine, Weights
from twinkle.checkpoint_engine.peft import CONFIG_FILE, WEIGHTS_FILE
from twinkle.core.errors import StaleWeights
from twinkle.infra.device_mesh import current_rank
from twinkle.infra.remote import remote_function

Part = Literal["merged", "base", "adapter"]
"""The whole model with the adapter's update in it; the whole model without; the adapter alone."""


class TrainedWeights(Protocol):
    """What a model must offer."""

    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, torch.Tensor]:
        """The weights of an adapter, or all of them."""
        ...

    def get_peft_config_dict(self, *, adapter_name: str = "") -> dict[str, Any]:
        """The adapter's config; empty where all parameters are trained."""
        ...

    def send_weights(self, *, adapter_name: str = "", merge: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights of the model, with the adapter's update in them or (``merge=False``) without."""
        ...


class SampledWeights(Protocol):
    """What a sampler must offer."""

    takes_whole_weights: bool

    def receive_weights(self, weights: Weights) -> None:
        """Take over all weights."""
        ...

    def receive_adapter(self, files: Mapping[str, bytes], adapter_name: str = "") -> None:
        """Take over an adapter as the files of a PEFT directory."""
        ...


def outgoing(model: TrainedWeights, part: Part, adapter_name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A part of a model's weights; on a mesh every rank must iterate."""
    if part == "adapter":
        return iter(model.get_state_dict(adapter_name=adapter_name).items())
    return model.send_weights(adapter_name=adapter_name, merge=part == "merged")


def take_over(
    sampler: SampledWeights | None, part: Part, weights: Weights, config: Mapping[str, Any], adapter_name: str
) -> None:
    """Let a sampler take what was sent; where there is none, only see it pass."""
    if sampler is None:
        for _ in weights:
            pass
    elif part != "adapter":
        sampler.receive_weights(weights)
    else:
        # A tensor is only good until the next one.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights}
        files = {
            CONFIG_FILE: json.dumps(config, sort_keys=True).encode(),
            WEIGHTS_FILE: safetensors.torch.save(tensors, metadata={"format": "pt"}),
        }
        sampler.receive_adapter(files, adapter_name)


class CheckpointEngineMixin:
    """What makes a component an end of a sync: it keeps the engine between the steps."""

    checkpoint_engine: CheckpointEngine | None = None

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def checkpoint_process(self) -> tuple[str, int]:
        """In which process this end is: the machine's name and the process's number."""
        return socket.gethostname(), os.getpid()

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def prepare_checkpoint_engine(self, engine: CheckpointEngine, sends: bool = False) -> Mapping[str, Any] | None:
        """Take part in a sync by this engine; of the ranks of a group that sends, the first one is the sender."""
        self.checkpoint_engine = engine
        engine.is_sender = sends and current_rank() == 0
        return engine.prepare()

    @remote_function(dispatch="all", collect="none", lazy_collect=True)
    def meet_checkpoint_ranks(self, arguments: Mapping[str, list[Any]]) -> None:
        """Meet the other side; of each argument this rank's own is taken."""
        self.init_checkpoint_process_group(**{name: values[current_rank()] for name, values in arguments.items()})

    def init_checkpoint_process_group(self, **kwargs: Any) -> None:
        """Meet the other side, as one rank."""
        self.engine_of_sync().init_process_group(**kwargs)

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def finalize_checkpoint_engine(self) -> None:
        """End the sync; that none is under way is no error."""
        if self.checkpoint_engine is not None:
            self.checkpoint_engine.finalize()
        self.checkpoint_engine = None

    def engine_of_sync(self) -> CheckpointEngine:
        """The engine of the sync under way.

        Raises:
            RuntimeError: There is none.
        """
        if self.checkpoint_engine is None:
            raise RuntimeError("no sync is under way; call prepare_checkpoint_engine first")
        return self.checkpoint_engine


class CheckpointSender(CheckpointEngineMixin):
    """A model whose weights are sent; it is ``TrainedWeights`` beside."""

    @remote_function(dispatch="all", execute="first", collect="first", lazy_collect=False)
    def checkpoint_config(self: Any, *, adapter_name: str = "") -> dict[str, Any]:
        """The adapter's config; empty where all parameters are trained."""
        config: dict[str, Any] = self.get_peft_config_dict(adapter_name=adapter_name)
        return config

    @remote_function(dispatch="all", collect="none", lazy_collect=True)
    def send_checkpoint(self: Any, part: Part, *, adapter_name: str = "") -> None:
        """Send a part of the weights by the engine of the sync. Every rank must be called."""
        finish(self.engine_of_sync().send_weights(outgoing(self, part, adapter_name)))


class CheckpointReceiver(CheckpointEngineMixin):
    """A sampler that takes weights over; it is ``SampledWeights`` beside.

    Between the beginning and the end of a sync, and after one that broke off, it refuses to sample: whoever asks gets
    the weights of the last sync that was begun, or an error.
    """

    takes_whole_weights: bool = True
    """Whether ``receive_weights`` works; a sampler without takes adapters alone."""
    weights_version: int = 0
    """The number of the last sync; 0 before any."""
    coming_version: int | None = None
    """Of the sync that was begun and has not ended."""

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def checkpoint_versions(self) -> tuple[int, bool]:
        """The number of the last sync that was begun, and whether whole weights are taken."""
        return self.coming_version or self.weights_version, self.takes_whole_weights

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def begin_sync(self, version: int) -> None:
        """From here on no answer comes from the weights of before."""
        self.coming_version = version

    @remote_function(dispatch="all", collect="none", lazy_collect=False)
    def end_sync(self, version: int) -> None:
        """All weights of this version are there.

        Raises:
            StaleWeights: This rank was not there when the sync began.
        """
        if self.coming_version != version:
            raise StaleWeights(f"version {version} has ended, but version {self.coming_version} was begun; sync again")
        self.weights_version, self.coming_version = version, None

    @remote_function(dispatch="all", collect="none", lazy_collect=True)
    def receive_checkpoint(
        self: Any, part: Part, config: Mapping[str, Any] | None = None, *, adapter_name: str = ""
    ) -> None:
        """Take over a part of the weights by the engine of the sync. Every rank must be called."""
        weights = plain(self.engine_of_sync().receive_weights())
        try:
            take_over(self, part, weights, config or {}, adapter_name)
        except Exception:
            # The sender goes on: it does not know what was wrong with a weight here.
            for _ in weights:
                pass
            raise

    def require_settled_weights(self) -> None:
        """Raise ``StaleWeights`` while a sync is under way, or when it broke off."""
        if self.coming_version is not None:
            raise StaleWeights(
                f"the sampler was to get weights version {self.coming_version}, which did not arrive whole; call"
                " sync_weights again"
            )


def finish(sent: Any) -> None:
    """Wait for an engine that sends by a coroutine."""
    if inspect.isawaitable(sent):
        asyncio.run(_awaited(sent))


def plain(received: Weights | AsyncIterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """What an engine received, also where it receives by a coroutine."""
    if isinstance(received, AsyncIterator):
        return iter(asyncio.run(_collected(received)))
    weights: Iterable[tuple[str, torch.Tensor]] = received
    return iter(weights)


async def _awaited(sent: Any) -> None:
    await sent


async def _collected(received: AsyncIterator[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) async for name, tensor in received]
