"""Keeps a sampler's weights in step with a training's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from twinkle.checkpoint_engine.base import CheckpointEngine, MemoryCheckpointEngine, Weights
from twinkle.checkpoint_engine.broadcast import BroadcastCheckpointEngine
from twinkle.checkpoint_engine.ends import (
    CheckpointReceiver,
    Part,
    SampledWeights,
    TrainedWeights,
    finish,
    outgoing,
    plain,
    take_over,
)
from twinkle.checkpoint_engine.groups import GroupSync
from twinkle.core.errors import InvalidInput
from twinkle.infra.remote import is_remote


class CheckpointEngineManager:
    """Brings the weights of a model to a sampler whenever it is told to.

    In one process they are handed over in memory. Under torchrun every rank calls; a rank without a model (``None``)
    gets them from the first one that has one, and a rank without a sampler only sends. Where both run on groups of
    devices, the script calls once, and the first rank that trains sends to all that sample.

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
        self._receiver = _receiver(sampler)
        self._engine = engine
        self._adapter_name = adapter_name
        self._is_base_there = False
        self.version = 0
        """The number of the last sync. An answer carries the one that its sampler had: ``weights_version``."""
        self._groups: GroupSync | None = None
        if is_remote(model) or is_remote(sampler):
            if not (is_remote(model) and is_remote(sampler)):
                here = "sampler" if is_remote(model) else "model"
                raise InvalidInput(here, "runs in this process and the other end on a group; give both a remote_group")
            self._groups = GroupSync(model, sampler, engine=engine, adapter_name=adapter_name)

    def sync_weights(self, merge_and_sync: bool = True) -> int:
        """Bring the sampler to the weights that the model has now. Calls to it after this sample with them.

        While this runs, and when it fails, the sampler refuses to sample, until a sync has ended well.

        Args:
            merge_and_sync: Of an adapter: send the whole model with its update merged in. Else the base weights go once
                and then the adapter alone, which is much less.

        Returns:
            The version of the weights, by which answers can be told apart.

        Raises:
            InvalidInput: The sampler does not take what is sent.
            SyncFailed: The weights did not arrive.
        """
        config = self._config()
        version = max(self._versions()) + 1
        parts: list[Part] = ["merged"]
        if config and not merge_and_sync:
            # One that takes adapters only has a base model of its own; that it is the same is the script's word.
            parts = ["adapter"] if self._is_base_there or not self._take_whole_weights() else ["base", "adapter"]
        # What a merged model left there is no base of an adapter, and neither is half of one.
        self._is_base_there = self._is_base_there and parts == ["adapter"]
        self._begin(version)
        for part in parts:
            self._carry(part, config)
        self._end(version)
        self._is_base_there = bool(config) and not merge_and_sync
        self.version = version
        return version

    # The same on groups, and among the ranks of this world.

    def _config(self) -> dict[str, Any]:
        if self._groups is not None:
            return self._groups.config()
        own = None if self._model is None else self._model.get_peft_config_dict(adapter_name=self._adapter_name)
        answers = [answer for answer in _gathered(own) if answer is not None]
        if not answers:
            raise InvalidInput("model", "is None on every rank; nothing could be sent")
        config: dict[str, Any] = answers[0]
        return config

    def _versions(self) -> list[int]:
        if self._groups is not None:
            return [version for version, _ in self._groups.states()]
        return _gathered(self.version if self._receiver is None else self._receiver.checkpoint_versions()[0])

    def _take_whole_weights(self) -> bool:
        if self._groups is not None:
            return all(takes_whole for _, takes_whole in self._groups.states())
        return all(_gathered(self._sampler is None or self._sampler.takes_whole_weights))

    def _begin(self, version: int) -> None:
        if self._groups is not None:
            self._groups.begin(version)
        elif self._receiver is not None:
            self._receiver.begin_sync(version)

    def _end(self, version: int) -> None:
        if self._groups is not None:
            self._groups.end(version)
        elif self._receiver is not None:
            self._receiver.end_sync(version)

    def _carry(self, part: Part, config: Mapping[str, Any]) -> None:
        if self._groups is not None:
            self._groups.carry(part, config)
        else:
            self._send(
                lambda model: outgoing(model, part, self._adapter_name),
                lambda weights: take_over(self._sampler, part, weights, config, self._adapter_name),
            )

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
        trainers = [rank for rank, is_there in enumerate(has_model) if is_there]
        others = [rank for rank, is_there in enumerate(has_model) if not is_there]
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        engine.is_sender = rank == trainers[0]
        metadata = _gathered(engine.prepare())
        ours, theirs = engine.build_topology(len(trainers), len(others), [metadata[r] for r in trainers + others])
        place, arguments = (trainers.index(rank), ours) if has_model[rank] else (others.index(rank), theirs)
        engine.init_process_group(**{name: values[place] for name, values in arguments.items()})
        try:
            if self._model is None:
                receive(plain(engine.receive_weights()))
            elif len(has_model) == 1:
                finish(engine.send_weights(weights_of(self._model)))
                receive(plain(engine.receive_weights()))
            else:
                kept = list(weights_of(self._model))
                finish(engine.send_weights(iter(kept)))
                receive(kept)
        finally:
            engine.finalize()


def _receiver(sampler: object) -> CheckpointReceiver | None:
    """The sampler, if it counts its syncs; one of a script's own need not."""
    return sampler if isinstance(sampler, CheckpointReceiver) else None


def _gathered(value: Any) -> list[Any]:
    """The value of every rank; of this process alone where there are no ranks."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
