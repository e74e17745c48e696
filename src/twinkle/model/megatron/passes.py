"""The passes of ``MegatronModel``: a batch in micro-batches, its outputs on every rank, and the gradient of its loss.

A loss of one micro-batch is differentiated where its outputs are computed. That of several may compare rows across
them: its outputs are computed first, without a graph, then its gradient by the outputs, and a second run brings that to
the weights; one run is enough where the gradient is known before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed

from twinkle.core.errors import InvalidInput
from twinkle.loss import Loss
from twinkle.model.base import ComponentModel, Rows
from twinkle.model.forward_pass import CAUSAL, ForwardPass, PassOptions
from twinkle.model.megatron.batch import Outputs, RowBatch, Sequences
from twinkle.model.megatron.layout import Layout, random_states, set_random_states
from twinkle.model.megatron.pipeline import Objective, Pipeline, RowOutputs, Wanted
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.transformers_pass import check_options

Gradients = Mapping[str, torch.Tensor]


class MegatronPasses(ComponentModel):
    """What runs rows through the stages."""

    layout: Layout
    pipeline: Pipeline

    @abstractmethod
    def _activate(self, group: OptimizerGroup, *, with_adapter: bool) -> AbstractContextManager[None]:
        """Let a group's adapter take part, alone; or none."""

    @abstractmethod
    def _collect_gradients(self, group: OptimizerGroup) -> None:
        """Bring what a backward pass has added to the parameters that the optimizer steps."""

    def _check_loss(self, loss: Loss) -> None:
        """Whatever a loss wants of a causal model is computed here."""
        if loss.require_values:
            raise InvalidInput("loss_cls", "wants values of a critic, which MegatronModel has not")

    def _forward(
        self, group: OptimizerGroup, rows: Rows, options: PassOptions, loss_kwargs: Mapping[str, Any]
    ) -> ForwardPass:
        batch, parts = self._parts(group, rows, options)
        self._train(is_training=True)
        run = _Run(self, group, batch, parts, Wanted.of(options, group.loss, has_labels=batch.labels is not None))
        with self._activate(group, with_adapter=True):
            outputs = run.score()
        last = _pass_of(batch, outputs, options, loss_kwargs, is_training=True)
        last.outputs = {
            name: values.requires_grad_(values.is_floating_point()) for name, values in last.outputs.items()
        }
        last.parts = run
        return last

    def _forward_only(
        self,
        group: OptimizerGroup,
        rows: Rows,
        options: PassOptions,
        loss_kwargs: Mapping[str, Any],
        disable_lora: bool,
    ) -> ForwardPass:
        if disable_lora and not group.name:
            raise InvalidInput("adapter_name", "there is no adapter; all parameters are trained")
        batch, parts = self._parts(group, rows, options)
        self._train(is_training=False)
        run = _Run(self, group, batch, parts, Wanted.of(options, group.loss, has_labels=batch.labels is not None))
        with self._activate(group, with_adapter=not disable_lora):
            outputs = run.score()
        last = _pass_of(batch, outputs, options, loss_kwargs, is_training=False)
        if group.loss.is_linear and batch.labels is not None and not disable_lora:
            # Megatron's own evaluation has the loss from the same call: scripts ask for the metric right after it.
            last.calculate_loss(group.loss)
        return last

    def _forward_backward(
        self, group: OptimizerGroup, rows: Rows, options: PassOptions, loss_kwargs: Mapping[str, Any]
    ) -> ForwardPass:
        batch, parts = self._parts(group, rows, options)
        if len(parts) > 1 and not group.loss.is_linear:
            return super()._forward_backward(group, rows, options, loss_kwargs)
        if batch.labels is None and group.loss.is_linear:
            raise InvalidInput("inputs", "have no labels; send the next token for each of input_ids")
        self._train(is_training=True)
        run = _Run(self, group, batch, parts, Wanted.of(options, group.loss, has_labels=batch.labels is not None))
        if len(parts) > 1:
            objective = run.objective(self._known_gradients(group, batch, options, loss_kwargs))
        else:
            objective = _loss_itself(group.loss, batch, options, loss_kwargs)
        with self._activate(group, with_adapter=True):
            outputs = run.train(objective)
        last = _pass_of(batch, outputs, options, loss_kwargs, is_training=True)
        last.calculate_loss(group.loss)
        return last

    def _backward(self, group: OptimizerGroup, last: ForwardPass) -> None:
        assert last.parts is not None, "every pass in training has them"
        with self._activate(group, with_adapter=True):
            last.parts.backward(last, lambda loss: loss)
        last.release_graph()

    def _known_gradients(
        self, group: OptimizerGroup, batch: RowBatch, options: PassOptions, loss_kwargs: Mapping[str, Any]
    ) -> Gradients:
        assert batch.labels is not None
        zeros_BT = torch.zeros(batch.labels.shape, requires_grad=True, device=self.layout.device)
        trial = _pass_of(batch, {"logps": zeros_BT}, options, loss_kwargs, is_training=True)
        trial.calculate_loss(group.loss)
        assert trial.loss is not None
        return {"logps": torch.autograd.grad(trial.loss, zeros_BT)[0]}

    def _parts(self, group: OptimizerGroup, rows: Rows, options: PassOptions) -> tuple[RowBatch, list[Sequences]]:
        """The batch and its micro-batches, as many as on every rank that shares layers with this one."""
        check_options(options)
        if options.task != CAUSAL:
            raise InvalidInput("task", f"is {options.task!r}; MegatronModel has {CAUSAL!r}")
        if options.router_replay_action is not None:
            raise InvalidInput("router_replay_action", "is not for MegatronModel; leave it out")
        batch = RowBatch.of(group.processor, rows, self.layout.device)
        num_rows = len(batch.sequences.input_ids)
        size = options.micro_batch_size
        if size is None:
            # A pipeline wants a micro-batch for each stage; a loss that compares rows has them together.
            size = -(-num_rows // self.layout.pp_size) if group.loss.is_linear else num_rows
        count = self.pipeline.count_of(self._most_of_all_ranks(-(-num_rows // size)))
        return batch, batch.parts(size, count)

    def _most_of_all_ranks(self, count: int) -> int:
        if (self.layout.mesh.ep_size or 1) == 1:
            return count
        most = torch.tensor(count, device=self.layout.device)
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=self.layout.groups.dp)
        return int(most)

    def _train(self, *, is_training: bool) -> None:
        for stage in self.pipeline.stages:
            stage.train(is_training)


class _Run:
    """One batch on its way through the stages, once or twice."""

    def __init__(
        self, model: MegatronPasses, group: OptimizerGroup, batch: RowBatch, parts: list[Sequences], wanted: Wanted
    ) -> None:
        self._model = model
        self._group = group
        self._batch = batch
        self._sequences = parts
        self._wanted = wanted
        self._state = random_states()

    def score(self) -> Outputs:
        """The outputs, without a graph."""
        with torch.no_grad():
            return self._joined(self._model.pipeline.run(self._sequences, self._wanted, None))

    def train(self, objective: Objective) -> Outputs:
        """The outputs; the objective's gradient is added to the parameters'."""
        found = self._model.pipeline.run(self._sequences, self._wanted, objective)
        self._model._collect_gradients(self._group)
        return self._joined(found)

    def backward(self, last: ForwardPass, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Run the batch again, with the random state of the first time, for the gradient of the pass's loss."""
        assert last.loss is not None
        leaves = {name: values for name, values in last.outputs.items() if values.requires_grad}
        found = torch.autograd.grad(scale(last.loss), list(leaves.values()), allow_unused=True)
        gradients = {name: each for name, each in zip(leaves, found, strict=True) if each is not None}
        after = random_states()
        set_random_states(self._state)
        self.train(self.objective(gradients))
        set_random_states(after)

    def objective(self, gradients: Gradients) -> Objective:
        """Of each micro-batch the sum of its outputs times the gradients by them: the same gradient by the weights."""
        firsts = [0]
        for part in self._sequences:
            firsts.append(firsts[-1] + len(part.input_ids))
        num_rows = len(self._batch.sequences.input_ids)

        def value(number: int, outputs: RowOutputs) -> torch.Tensor:
            total = sum((rows[0].flatten()[:0].sum() for rows in outputs.values()), torch.zeros(()))
            for name, gradient_BT in gradients.items():
                for index, row in enumerate(outputs[name], start=firsts[number]):
                    if index < num_rows:
                        total = total + (row * self._batch.row_values(gradient_BT, index).to(row.dtype)).sum()
            return total

        return value

    def _joined(self, found: list[RowOutputs]) -> Outputs:
        num_rows = len(self._batch.sequences.input_ids)
        return {name: self._batch.padded([row for each in found for row in each[name]][:num_rows]) for name in found[0]}


def _loss_itself(loss: Loss, batch: RowBatch, options: PassOptions, loss_kwargs: Mapping[str, Any]) -> Objective:
    def value(number: int, outputs: RowOutputs) -> torch.Tensor:
        padded = {name: batch.padded(rows) for name, rows in outputs.items()}
        last = _pass_of(batch, padded, options, loss_kwargs, is_training=True)
        last.calculate_loss(loss)
        assert last.loss is not None
        return last.loss

    return value


def _pass_of(
    batch: RowBatch, outputs: Outputs, options: PassOptions, loss_kwargs: Mapping[str, Any], *, is_training: bool
) -> ForwardPass:
    return ForwardPass(
        inputs=batch.inputs,
        outputs=outputs,
        is_training=is_training,
        loss_kwargs=loss_kwargs,
        return_logits=options.return_logits,
    )
