"""What a training script calls on adapters of a fused engine, wherever the engine is: in its process or in a worker.

A loss over a batch takes two of the engine's passes, one for the logprobs and one for the gradient; a likelihood, whose
gradient does not depend on the logprobs, takes one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from twinkle.checkpoint_engine.directory import read_files, write_files
from twinkle.checkpoint_engine.peft import export_adapter, import_adapter
from twinkle.checkpoint_engine.peft_settings import write_settings
from twinkle.checkpoint_engine.peft_tensors import stored_tensors
from twinkle.core.errors import InvalidInput
from twinkle.data_format.answers import ModelOutput
from twinkle.loss import Loss
from twinkle.model.base import ComponentModel, Rows
from twinkle.model.forward_pass import CAUSAL, EMBEDDING, ForwardPass, PassOptions
from twinkle.model.fused.core import LoraCore
from twinkle.model.fused.embedding import embedding_pass
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.parameters import lend_moments
from twinkle.model.fused.rows import (
    open_pass,
    raise_failures,
    refuse_options,
    set_outputs,
    with_teacher_indices,
)
from twinkle.model.fused.script_pass import ScriptPass, keep
from twinkle.model.fused.training import TrainOutcome
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.optimizers import OptimizerArg
from twinkle.model.outgoing import NamedWeights, outgoing_fused
from twinkle.model.script_settings import rows_of
from twinkle.module.lora import LoraAdapter, LoraConfig, Segment
from twinkle.module.packed_attention import CausalSpans


class FusedComponent(ComponentModel):
    """The calls on adapters that live on ``core``.

    Args:
        core: The engine.
        model_id: Whose tokenizer and processor templates take.
        max_length: Tokens of all rows of one batch.
    """

    def __init__(self, core: LoraCore, *, model_id: str, max_length: int) -> None:
        super().__init__()
        self.core = core
        self.model_id = model_id
        self.max_length = max_length
        self._adapters: dict[str, LoraAdapter] = {}
        self.base_adapter = core.pool.create_empty(LoraConfig(rank=1), trainable=False)

    @property
    def model(self) -> Any:
        """The frozen base model as transformers made it, its layers those of the engine."""
        return self._whole.base

    @property
    def _whole(self) -> FusedLoraModel:
        """The engine, for what needs the base model's layers.

        Raises:
            InvalidInput: They are Megatron's.
        """
        if not isinstance(self.core, FusedLoraModel):
            raise InvalidInput("model", "is spread over ranks by Megatron, which does not hand out its layers")
        return self.core

    def set_optimizer(
        self,
        optimizer_cls: OptimizerArg = "AdamW",
        *,
        lr: float = 1e-5,
        weight_decay: float = 0.01,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set the optimizer, one of ``torch.optim``; Adam's moments are kept in the adapter's own buffers."""
        super().set_optimizer(optimizer_cls, lr=lr, weight_decay=weight_decay, adapter_name=adapter_name, **settings)
        group = self.group(adapter_name)
        if isinstance(group.optimizer, torch.optim.Adam):
            lend_moments(group.optimizer, self._adapters[group.name], group.parameters)

    def _embedding_tables(self, group: OptimizerGroup) -> frozenset[str]:
        return frozenset()

    def _check_loss(self, loss: Loss) -> None:
        name = type(loss).__name__
        if loss.require_values:
            raise InvalidInput("loss_cls", f"{name} wants values, which a critic has; use TransformersValueModel")
        if loss.require_logits and not loss.works_without_logits:
            raise InvalidInput("loss_cls", f"{name} wants logits, which this model never keeps; use TransformersModel")

    # Passes.

    def open(
        self, group: OptimizerGroup, rows: Rows, loss_kwargs: Mapping[str, Any], *, is_training: bool = True
    ) -> ForwardPass:
        return open_pass(
            rows_of(group, rows),
            group.processor,
            with_teacher_indices(loss_kwargs),
            is_training=is_training,
            max_length=self.max_length,
            picture_rules=self.core.picture_rules,
        )

    def _forward(
        self, group: OptimizerGroup, rows: Rows, options: PassOptions, loss_kwargs: Mapping[str, Any]
    ) -> ForwardPass:
        refuse_options(options, may_return_logits=False)
        if options.task == EMBEDDING:
            return self.embed(group, rows, loss_kwargs, self._adapters[group.name], is_training=True)
        opened = self.open(group, rows, loss_kwargs)
        self._run([ScriptPass(group, self._adapters[group.name], opened, "score")])
        return opened

    def _forward_only(
        self,
        group: OptimizerGroup,
        rows: Rows,
        options: PassOptions,
        loss_kwargs: Mapping[str, Any],
        disable_lora: bool,
    ) -> ForwardPass:
        refuse_options(options, may_return_logits=True)
        adapter = self.base_adapter if disable_lora else self._adapters[group.name]
        if options.task == EMBEDDING:
            return self.embed(group, rows, loss_kwargs, adapter, is_training=False)
        opened = self.open(group, rows, loss_kwargs, is_training=False)
        self._run([ScriptPass(group, adapter, opened, "score")])
        if options.return_logits:
            opened.return_logits = True
            opened.outputs["logits"] = self._logits(opened.tokens, adapter)
        return opened

    def embed(
        self,
        group: OptimizerGroup,
        rows: Rows,
        loss_kwargs: Mapping[str, Any],
        adapter: LoraAdapter,
        *,
        is_training: bool,
    ) -> ForwardPass:
        return embedding_pass(
            self.core.embedding,
            adapter,
            rows_of(group, rows),
            group.processor,
            loss_kwargs,
            is_training=is_training,
            max_length=self.max_length,
            vocab_size=self.core.info.vocab_size,
        )

    def calculate_loss(self, *, adapter_name: str = "", **loss_kwargs: Any) -> float:
        """The loss of the last pass, in training or evaluation. No graph stays: its gradient is found at once."""
        value = super().calculate_loss(adapter_name=adapter_name, **loss_kwargs)
        self.group(adapter_name).require_last("calculate_loss").settle_loss()
        return value

    def _backward(self, group: OptimizerGroup, last: ForwardPass) -> None:
        if last.parts is not None:
            last.parts.backward(last, lambda loss: loss)
            return
        outcomes = self.core.forward_backward([ScriptPass(group, self._adapters[group.name], last, "gradient").work()])
        raise_failures(outcomes)

    def forward_backward(
        self,
        *,
        inputs: Rows,
        adapter_name: str = "",
        temperature: float = 1.0,
        return_logits: bool = False,
        task: str = CAUSAL,
        micro_batch_size: int | None = None,
        router_replay_action: object = None,
        gradient_accumulation_steps: int | None = None,
        **loss_kwargs: Any,
    ) -> ModelOutput:
        """Forward, loss and backward of one adapter. Passes are cut by tokens, whatever ``micro_batch_size`` says."""
        options = PassOptions(temperature, return_logits, task, micro_batch_size, router_replay_action)
        refuse_options(options, may_return_logits=False)
        group = self.group(adapter_name)
        if gradient_accumulation_steps is not None:
            group.set_accumulation(gradient_accumulation_steps)
        if task == EMBEDDING:
            opened = self._forward_backward(group, inputs, options, loss_kwargs)
            keep(group, opened, counts=True)
            return opened.output()
        return self.fused_forward_backward({group.name: inputs}, {group.name: loss_kwargs})[group.name]

    def fused_forward_backward(
        self, inputs: Mapping[str, Rows], loss_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, ModelOutput]:
        """``forward_backward`` of several adapters at once, their rows packed into the same passes.

        Each adapter's result is the one it has alone: the same bits where ``core.determinism`` is not ``none``.

        Args:
            inputs: By adapter, its rows.
            loss_kwargs: By adapter, what its loss is called with; may lack adapters.

        Raises:
            InvalidInput: Rows of an adapter cannot be run; nothing was changed.
            Exception: One adapter's pass failed, nothing of it was applied; those of the others were.
            ExceptionGroup: Those of several adapters failed.
        """
        kwargs = loss_kwargs or {}
        groups = [self.group(name) for name in inputs]
        if len({group.name for group in groups}) < len(groups):
            raise InvalidInput("inputs", "name one adapter twice")
        passes = [
            ScriptPass(group, self._adapters[group.name], self.open(group, rows, kwargs.get(name, {})), "train")
            for group, (name, rows) in zip(groups, inputs.items(), strict=True)
        ]
        outcomes = self.core.forward_backward([each.work() for each in passes])
        for each, outcome in zip(passes, outcomes, strict=True):
            if isinstance(outcome, TrainOutcome):
                each.take(outcome)
        raise_failures(outcomes)
        return {name: each.opened.output() for name, each in zip(inputs, passes, strict=True)}

    def _run(self, passes: Sequence[ScriptPass]) -> None:
        outcomes = self.core.forward_backward([each.work() for each in passes])
        raise_failures(outcomes)
        for each, outcome in zip(passes, outcomes, strict=True):
            assert isinstance(outcome, TrainOutcome)
            set_outputs(each.opened, outcome)

    def _logits(self, tokens: Sequence[torch.Tensor], adapter: LoraAdapter) -> torch.Tensor:
        core = self._whole
        rows: list[torch.Tensor] = []
        for row_N in tokens:
            tokens_N = row_N.to(core.device)
            positions_N = torch.arange(len(tokens_N), device=core.device)
            segments = [Segment(adapter, 0, len(tokens_N))]
            hidden_NH = core.run_packed(tokens_N, positions_N, segments, CausalSpans([(0, len(tokens_N))]))
            rows.append(core.logits(hidden_NH, segments).cpu())
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    # The end of a window.

    def _clear_gradients(self, group: OptimizerGroup) -> None:
        self._adapters[group.name].clear_gradients()

    def _publish(self, group: OptimizerGroup) -> None:
        self._adapters[group.name].publish()

    # Files.

    def _write_weights(self, group: OptimizerGroup, folder: Path, *, is_writer: bool) -> None:
        if is_writer:
            write_files(folder, export_adapter(self._adapters[group.name], self.model_id))

    def _load_weights(self, group: OptimizerGroup, folder: Path) -> None:
        self._take_weights(group, read_files(folder), str(folder))

    def _take_weights(self, group: OptimizerGroup, files: Mapping[str, bytes], where: str) -> None:
        adapter = self._adapters[group.name]
        loaded = import_adapter(self.core.pool, files, with_optimizer=False, trainable=False)
        if loaded.layout.shapes != adapter.layout.shapes:
            raise InvalidInput("checkpoint", f"{where} holds an adapter of other layers or ranks than {group.name!r}")
        adapter.params.copy_(loaded.params)
        adapter.publish()

    def _mark_gradients(self, group: OptimizerGroup) -> None:
        self._adapters[group.name].has_gradients = group.num_open > 0

    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, torch.Tensor]:
        """Copies of the adapter's weights, by PEFT's names."""
        adapter = self._adapters[self.group(adapter_name).name]
        return {name: tensor.clone() for name, tensor in stored_tensors(adapter.layout, adapter.params).items()}

    def send_weights(self, *, adapter_name: str = "", merge: bool = True) -> NamedWeights:
        """All weights by transformers' names, the adapter's update in them or left out."""
        adapter = self._adapters[self.group(adapter_name).name] if merge else None
        return outgoing_fused(self._whole.base_weights(), adapter)

    def get_peft_config_dict(self, *, adapter_name: str = "") -> dict[str, Any]:
        """The adapter's config as PEFT has it."""
        config: dict[str, Any] = json.loads(
            write_settings(self._adapters[self.group(adapter_name).name], self.model_id)
        )
        return config
