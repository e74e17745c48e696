"""Passes through a transformers model as it is: at once or in parts, with a graph or without.

What sets them up is ``TransformersModel``'s.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed

from twinkle.core.errors import InvalidInput
from twinkle.loss import Loss
from twinkle.model.base import ComponentModel, Rows
from twinkle.model.forward_pass import CAUSAL, ForwardPass, PassOptions
from twinkle.model.micro_batches import MicroBatches, Scale
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.parallel.experts import SharedExperts
from twinkle.model.parallel.gradient_sync import GradientSync
from twinkle.model.parallel.sequence import SequenceParallel
from twinkle.model.transformers.moe.router_replay import RouterReplay, RouterReplayAction
from twinkle.model.transformers_pass import check_options, outputs_of
from twinkle.processor import ModelBatch


class PlainPasses(ComponentModel):
    """The passes of ``TransformersModel``."""

    model: Any
    device: torch.device
    _compute_dtype: torch.dtype | None
    _is_sharded: bool
    _frozen: set[str]
    _sync: GradientSync
    _sequences: SequenceParallel | None
    _experts: SharedExperts | None
    _may_replay: bool
    _routers: RouterReplay | None

    @abstractmethod
    def _shard_once(self) -> None:
        """Spread the weights over the ranks before the first pass that needs them so."""

    @abstractmethod
    def _require_adapter(self, group: OptimizerGroup) -> None:
        """Raise ``InvalidInput`` where all parameters are trained."""

    def _check_loss(self, loss: Loss) -> None:
        """Whatever a loss wants is computed here."""

    def _forward(
        self, group: OptimizerGroup, rows: Rows, options: PassOptions, loss_kwargs: Mapping[str, Any]
    ) -> ForwardPass:
        self._shard_once()
        self._activate(group)
        self.model.train()
        if options.micro_batch_size is not None:
            return self._in_parts(group, rows, options, loss_kwargs, is_training=True).score()
        return self._run(group, rows, options, loss_kwargs, is_training=True)

    def _forward_backward(
        self, group: OptimizerGroup, rows: Rows, options: PassOptions, loss_kwargs: Mapping[str, Any]
    ) -> ForwardPass:
        if options.micro_batch_size is None or options.task != CAUSAL or not group.loss.is_linear:
            return super()._forward_backward(group, rows, options, loss_kwargs)
        self._shard_once()
        self._activate(group)
        self.model.train()
        labels_BT = group.processor(rows, device=self.device).labels
        if labels_BT is None:
            raise InvalidInput("inputs", "have no labels; send the next token for each of input_ids")
        parts = self._in_parts(group, rows, options, loss_kwargs, is_training=True)
        return parts.train_linear(labels_BT, group.loss, loss_kwargs, self._scale_of(group))

    def _forward_only(
        self,
        group: OptimizerGroup,
        rows: Rows,
        options: PassOptions,
        loss_kwargs: Mapping[str, Any],
        disable_lora: bool,
    ) -> ForwardPass:
        self._shard_once()
        self._activate(group)
        self.model.eval()
        base_alone: AbstractContextManager[Any] = nullcontext()
        if disable_lora:
            self._require_adapter(group)
            base_alone = self.model.disable_adapter()
        with torch.no_grad(), base_alone:
            if options.micro_batch_size is not None:
                return self._in_parts(group, rows, options, loss_kwargs, is_training=False).score()
            return self._run(group, rows, options, loss_kwargs, is_training=False)

    def _in_parts(
        self,
        group: OptimizerGroup,
        rows: Rows,
        options: PassOptions,
        loss_kwargs: Mapping[str, Any],
        *,
        is_training: bool,
    ) -> MicroBatches:
        check_options(options)
        assert options.micro_batch_size is not None
        return MicroBatches(
            lambda part: self._run(group, part, options, loss_kwargs, is_training=is_training),
            [rows] if isinstance(rows, Mapping) else rows,
            options.micro_batch_size,
            pads_left=group.processor.padding_side == "left" and not group.processor.padding_free,
            agree=self._most_of_all_ranks,
        )

    def _most_of_all_ranks(self, count: int) -> int:
        """The largest count of all ranks where they share layers, and so must make as many passes each."""
        if not self._is_sharded and self._experts is None:
            return count
        most = torch.tensor(count, device=self.device)
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=self._sync.process_group)
        return int(most)

    def _activate(self, group: OptimizerGroup) -> None:
        if group.name and self.model.active_adapter != group.name:
            self.model.set_adapter(group.name, inference_mode=group.name in self._frozen)

    def _run(
        self,
        group: OptimizerGroup,
        rows: Rows,
        options: PassOptions,
        loss_kwargs: Mapping[str, Any],
        *,
        is_training: bool,
    ) -> ForwardPass:
        check_options(options)
        batch = group.processor(rows, device=self.device)
        action = self._route(options, [rows] if isinstance(rows, Mapping) else rows, batch)
        inputs = {} if batch.labels is None else {"labels": batch.labels}
        with torch.autocast(
            self.device.type, self._compute_dtype, enabled=self._compute_dtype is not None and not self._is_sharded
        ):
            outputs = self._outputs(group, batch, options)
        if action is RouterReplayAction.RECORD and self._routers is not None:
            outputs["routed_experts"] = self._routers.recorded(batch)
        return ForwardPass(
            inputs=inputs,
            outputs=outputs,
            is_training=is_training,
            loss_kwargs=loss_kwargs,
            return_logits=options.return_logits,
        )

    def _route(
        self, options: PassOptions, rows: Sequence[Mapping[str, Any]], batch: ModelBatch
    ) -> RouterReplayAction | None:
        """Tell the routers what the pass does; nothing where routing is not replayed at all."""
        action = RouterReplayAction.of(options.router_replay_action) if self._may_replay else None
        if action is not None and self._sequences is not None:
            raise InvalidInput("router_replay_action", "is not for sequences shared over ranks; use dp, fsdp or ep")
        if action is not None and self._routers is None:
            self._routers = RouterReplay(self.model, self.model.config.get_text_config())
        if self._routers is not None:
            self._routers.begin(action, rows, batch)
        return action

    def _outputs(self, group: OptimizerGroup, batch: ModelBatch, options: PassOptions) -> dict[str, torch.Tensor]:
        compute = outputs_of if self._sequences is None else self._sequences.outputs_of
        return compute(self.model, batch, group.loss, options)

    def _backward(self, group: OptimizerGroup, last: ForwardPass) -> None:
        scale = self._scale_of(group)
        if last.parts is not None:
            last.parts.backward(last, scale)
        else:
            assert last.loss is not None
            scale(last.loss).backward()
        last.release_graph()

    @staticmethod
    def _scale_of(group: OptimizerGroup) -> Scale:
        return (lambda loss: loss) if group.scaler is None else group.scaler.scale
