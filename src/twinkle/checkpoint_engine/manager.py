"""Keeps a sampler's weights in step with a training's."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import distributed

from twinkle.checkpoint_engine.base import CheckpointEngine, MemoryCheckpointEngine, Weights
from twinkle.checkpoint_engine.broadcast import BroadcastCheckpointEngine
from twinkle.checkpoint_engine.peft import CONFIG_FILE, WEIGHTS_FILE
from twinkle.core.errors import InvalidInput


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


class CheckpointEngineManager:
    """Brings the weights of a model to a sampler whenever it is told to.

    In one process they are handed over in memory. Under torchrun every rank calls; a rank without a model (``None``)
    gets them from the first one that has one, and a rank without a sampler only sends.

    Args:
        model: What trains.
        sampler: What samples.
        platform: Taken for the sake of scripts; the way is chosen by the processes there are.
        engine: A way of one's own, in place of the one that is chosen.
        adapter_name: Whose weights; the only adapter's if omitted.
    """

    def __init__(
        self,
        model: TrainedWeights | None,
        sampler: SampledWeights | None,
        platform: str = "GPU",
        *,
        engine: CheckpointEngine | None = None,
        adapter_name: str = "",
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._engine = engine
        self._adapter_name = adapter_name
        self._is_base_there = False

    def sync_weights(self, merge_and_sync: bool = True) -> None:
        """Bring the sampler to the weights that the model has now. Calls to it after this sample with them.

        Args:
            merge_and_sync: Of an adapter: send the whole model with its update merged in. Else the base weights go once
                and then the adapter alone, which is much less.

        Raises:
            InvalidInput: The sampler does not take what is sent.
        """
        config = self._agreed(self._config)
        if not config or merge_and_sync:
            self._send(lambda model: model.send_weights(adapter_name=self._adapter_name), self._receive_all)
            # What is there now is no base of an adapter.
            self._is_base_there = False
            return
        # One that takes adapters only has a base model of its own; that it is the same is the script's word.
        if not self._is_base_there and self._agreed_all(self._takes_whole_weights()):
            self._send(
                lambda model: model.send_weights(adapter_name=self._adapter_name, merge=False), self._receive_all
            )
        self._is_base_there = True
        self._send(self._adapter_weights, lambda weights: self._receive_adapter(weights, config))

    def _config(self) -> dict[str, Any]:
        assert self._model is not None
        return self._model.get_peft_config_dict(adapter_name=self._adapter_name)

    def _adapter_weights(self, model: TrainedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(model.get_state_dict(adapter_name=self._adapter_name).items())

    def _takes_whole_weights(self) -> bool:
        return self._sampler is None or self._sampler.takes_whole_weights

    def _receive_all(self, weights: Weights) -> None:
        if self._sampler is None:
            for _ in weights:
                pass
        else:
            self._sampler.receive_weights(weights)

    def _receive_adapter(self, weights: Weights, config: Mapping[str, Any]) -> None:
        # A tensor is only good until the next one.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights}
        if self._sampler is not None:
            files = {
                CONFIG_FILE: json.dumps(config, sort_keys=True).encode(),
                WEIGHTS_FILE: safetensors.torch.save(tensors, metadata={"format": "pt"}),
            }
            self._sampler.receive_adapter(files, self._adapter_name)

    # Between the ranks.

    def _agreed(self, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the first rank with a model answers, on every rank."""
        own = None if self._model is None else ask()
        answers = [answer for answer in _gathered(own) if answer is not None]
        if not answers:
            raise InvalidInput("model", "is None on every rank; nothing could be sent")
        return answers[0]

    @staticmethod
    def _agreed_all(answer: bool) -> bool:
        return all(_gathered(answer))

    def _send(
        self,
        weights_of: Callable[[TrainedWeights], Iterator[tuple[str, torch.Tensor]]],
        receive: Callable[[Weights], None],
    ) -> None:
        has_model = _gathered(self._model is not None)
        if all(has_model) and self._engine is None:
            # Every rank has the weights of its own.
            assert self._model is not None
            receive(weights_of(self._model))
            return
        engine = self._engine or (BroadcastCheckpointEngine() if len(has_model) > 1 else MemoryCheckpointEngine())
        metadata = _gathered(engine.prepare())
        trainers = [rank for rank, is_there in enumerate(has_model) if is_there]
        others = [rank for rank, is_there in enumerate(has_model) if not is_there]
        ours, theirs = engine.build_topology(len(trainers), len(others), [metadata[r] for r in trainers + others])
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        place, arguments = (trainers.index(rank), ours) if has_model[rank] else (others.index(rank), theirs)
        engine.init_process_group(**{name: values[place] for name, values in arguments.items()})
        try:
            if self._model is None:
                receive(_plain(engine.receive_weights()))
            elif len(has_model) == 1:
                _finish(engine.send_weights(weights_of(self._model)))
                receive(_plain(engine.receive_weights()))
            else:
                kept = list(weights_of(self._model))
                _finish(engine.send_weights(iter(kept)))
                receive(kept)
        finally:
            engine.finalize()


def _gathered(value: Any) -> list[Any]:
    """The value of every rank; of this process alone where there are no ranks."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def _finish(sent: Any) -> None:
    if inspect.isawaitable(sent):
        asyncio.run(_awaited(sent))


async def _awaited(sent: Any) -> None:
    await sent


def _plain(received: Any) -> Weights:
    if isinstance(received, AsyncIterator):
        return asyncio.run(_collected(received))
    weights: Weights = received
    return weights


async def _collected(received: AsyncIterator[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) async for name, tensor in received]
