"""Many adapters on one frozen base model, under the names that training scripts use.

The work is the fused engine's (``FusedLoraModel``). A loss over a batch takes two of its passes, one for the logprobs
and one for the gradient; a likelihood, whose gradient does not depend on the logprobs, takes one.
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
from twinkle.core.errors import InvalidInput, NoRoom
from twinkle.data_format.answers import ModelOutput
from twinkle.hub.image_processor import load_image_processor
from twinkle.hub.trust import open_model
from twinkle.infra import DeviceMesh
from twinkle.infra.runtime import mesh_of
from twinkle.loss import Loss
from twinkle.model.base import ComponentModel, Rows
from twinkle.model.forward_pass import CAUSAL, EMBEDDING, ForwardPass, PassOptions
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.embedding import embedding_pass
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.parameters import lend_moments, parameters_of
from twinkle.model.fused.rows import (
    job_of,
    linear_weights,
    open_pass,
    raise_failures,
    refuse_options,
    set_outputs,
    weights_of,
    with_teacher_indices,
)
from twinkle.model.fused.training import TrainJob, TrainOutcome
from twinkle.model.loading import load_base_model, stored_paths, takes_pictures
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.optimizers import OptimizerArg
from twinkle.model.outgoing import NamedWeights, outgoing_fused
from twinkle.model.parallel.gradient_sync import sync_of
from twinkle.model.parallel.settings import FsdpSettings, check_ddp, check_strategy
from twinkle.model.peft_config import ALL_LINEAR, lora_config_of
from twinkle.model.placement import MixedPrecision, device_of, model_class, weights_dtype
from twinkle.model.script_settings import rows_of
from twinkle.module.lora import LoraAdapter, LoraConfig, Segment
from twinkle.module.packed_attention import CausalSpans


class MultiLoraTransformersModel(ComponentModel):
    """A frozen base model with room for ``max_loras`` adapters of rank up to ``max_r``.

    Args:
        model_id: A folder, ``ms://org/name``, ``hf://org/name`` or ``org/name``, each with ``@revision``.
        model_cls: The transformers class to load it with, or its name; the causal language model of its config if
            omitted.
        strategy, ddp_config, fsdp_config, memory_efficient_init: As for ``TransformersModel``; here none has something
            to set.
        config: A transformers config in place of the model's own.
        device_mesh: Data parallelism: every rank holds the model and brings its own rows. That of ``initialize`` if
            omitted.
        mixed_precision: ``bf16`` or ``no``, the base weights' dtype; by default bf16 on accelerators. Adapters are
            float32 always.
        max_loras: Adapters at a time.
        max_r: Their largest rank.
        max_length: Tokens of all rows of one batch.
        target_modules: What an adapter trains whose config does not say.
        tokens_per_pass: How many tokens go through the model at once.
        from_pretrained_kwargs: For transformers.
    """

    def __init__(
        self,
        model_id: str | None = None,
        config: Any = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision | None = None,
        *,
        model_cls: Any = None,
        strategy: str = "accelerate",
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        max_loras: int = 5,
        max_r: int = 32,
        max_length: int = 8192,
        target_modules: str | Sequence[str] = ALL_LINEAR,
        tokens_per_pass: int | None = None,
        **from_pretrained_kwargs: Any,
    ) -> None:
        super().__init__()
        if model_id is None:
            raise InvalidInput("model_id", "is missing; send a folder or an id of a hub")
        check_strategy(strategy)
        check_ddp(ddp_config)
        FsdpSettings.of(fsdp_config)
        prepare_environment()
        device_mesh = mesh_of(device_mesh)
        device = device_of(device_mesh)
        self.model_id, settings = open_model(model_id, from_pretrained_kwargs)
        self.max_loras, self.max_r, self.max_length = max_loras, max_r, max_length
        self.target_modules = target_modules
        dtype = weights_dtype(mixed_precision, device)
        image_processor = load_image_processor(self.model_id) if takes_pictures(self.model_id) else None
        model: Any
        if model_cls is None and config is None and not settings:
            model = load_base_model(
                self.model_id, name=self.model_id, dtype=dtype, with_tower=image_processor is not None
            )
        else:
            loader = model_class(model_cls)
            own_config = {} if config is None else {"config": config}
            model = loader.from_pretrained(self.model_id, **own_config, **{"dtype": dtype, **settings})
        self.core = FusedLoraModel(
            model.to(device),
            name=self.model_id,
            tokens_per_pass=tokens_per_pass,
            image_processor=image_processor,
            paths=stored_paths(self.model_id),
        )
        self._sync = sync_of(device_mesh, device)
        self._adapters: dict[str, LoraAdapter] = {}
        self._base = self.core.pool.create_empty(LoraConfig(rank=1), trainable=False)

    @property
    def model(self) -> Any:
        """The frozen base model as transformers made it, its layers those of the engine."""
        return self.core.base

    # Adapters.

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1, is_trainable: bool = True
    ) -> None:
        """Add an adapter by its ``peft.LoraConfig``, or from a checkpoint directory.

        Raises:
            NoRoom: All slots are taken, or the rank is above ``max_r``.
            InvalidInput: The name is taken or empty, or the config asks for what the engine does not compute.
        """
        if not adapter_name or adapter_name in self._adapters:
            raise InvalidInput(
                "adapter_name", f"{adapter_name!r} is {'taken' if adapter_name else 'empty'}; send another"
            )
        if len(self._adapters) >= self.max_loras:
            raise NoRoom(f"max_loras: all {self.max_loras} slots are taken; remove_adapter one first")
        if isinstance(config_or_dir, (str, Path)):
            adapter = import_adapter(
                self.core.pool, read_files(Path(config_or_dir)), with_optimizer=False, trainable=is_trainable
            )
        else:
            config = lora_config_of(config_or_dir, self.core.pool.targets, self.target_modules)
            self._require_rank(config)
            adapter = self.core.create_adapter(config, trainable=is_trainable)
        self._require_rank(adapter.config)
        self._adapters[adapter_name] = adapter
        parameters = parameters_of(adapter)
        self._sync.share(parameters.values())
        adapter.publish()
        self.optimizer_group[adapter_name] = OptimizerGroup(
            adapter_name,
            parameters,
            self._sync,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )

    def remove_adapter(self, adapter_name: str) -> None:
        """Forget an adapter and everything set for it; its slot is free again."""
        group = self.group(adapter_name)
        group.forwarding.close()
        del self.optimizer_group[group.name], self._adapters[group.name]

    def _require_rank(self, config: LoraConfig) -> None:
        rank = max([config.rank, *(module.rank for module in config.modules or ())])
        if rank > self.max_r:
            raise NoRoom(f"r: is {rank}, max_r is {self.max_r}; lower it, or load the model with a larger max_r")

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
            lend_moments(group.optimizer, self._adapters[group.name])

    def _embedding_tables(self, group: OptimizerGroup) -> frozenset[str]:
        return frozenset()

    def _check_loss(self, loss: Loss) -> None:
        name = type(loss).__name__
        if loss.require_entropy:
            raise InvalidInput(
                "loss_cls", f"{name} wants entropies, which this model does not compute; set entropy_coef=0"
            )
        if loss.require_values:
            raise InvalidInput("loss_cls", f"{name} wants values, which a critic has; use TransformersValueModel")
        if loss.require_logits and not loss.works_without_logits:
            raise InvalidInput("loss_cls", f"{name} wants logits, which this model never keeps; use TransformersModel")

    # Passes.

    def _open(
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
            return self._embed(group, rows, loss_kwargs, self._adapters[group.name], is_training=True)
        opened = self._open(group, rows, loss_kwargs)
        self._score([opened], [self._adapters[group.name]])
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
        adapter = self._base if disable_lora else self._adapters[group.name]
        if options.task == EMBEDDING:
            return self._embed(group, rows, loss_kwargs, adapter, is_training=False)
        opened = self._open(group, rows, loss_kwargs, is_training=False)
        self._score([opened], [adapter])
        if options.return_logits:
            opened.return_logits = True
            opened.outputs["logits"] = self._logits(opened.tokens, adapter)
        return opened

    def _embed(
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

    def _backward(self, group: OptimizerGroup, last: ForwardPass) -> None:
        if last.parts is not None:
            last.parts.backward(last, lambda loss: loss)
            return
        self._run([job_of(last, self._adapters[group.name], weights_of(last))])

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
        if task == EMBEDDING:
            return super().forward_backward(
                inputs=inputs,
                adapter_name=group.name,
                task=task,
                gradient_accumulation_steps=gradient_accumulation_steps,
                **loss_kwargs,
            )
        if gradient_accumulation_steps is not None:
            group.set_accumulation(gradient_accumulation_steps)
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
        opened = [
            self._open(group, rows, kwargs.get(name, {}))
            for group, (name, rows) in zip(groups, inputs.items(), strict=True)
        ]
        adapters = [self._adapters[group.name] for group in groups]
        curved = [index for index, group in enumerate(groups) if not group.loss.is_linear]
        self._score([opened[index] for index in curved], [adapters[index] for index in curved])
        jobs: list[TrainJob] = []
        for group, last, adapter in zip(groups, opened, adapters, strict=True):
            if group.loss.is_linear:
                weights = linear_weights(last, group.loss)
            else:
                last.calculate_loss(group.loss)
                weights = weights_of(last)
            jobs.append(job_of(last, adapter, weights))
        outcomes = self.core.forward_backward(jobs)
        for group, last, outcome in zip(groups, opened, outcomes, strict=True):
            if isinstance(outcome, TrainOutcome):
                if last.loss is None:
                    set_outputs(last, outcome.logprobs)
                    last.calculate_loss(group.loss)
                self._keep(group, last)
                group.count_backward(last)
        raise_failures(outcomes)
        return {name: last.output() for name, last in zip(inputs, opened, strict=True)}

    def _score(self, passes: Sequence[ForwardPass], adapters: Sequence[LoraAdapter]) -> None:
        outcomes = self._run([job_of(opened, adapter, None) for opened, adapter in zip(passes, adapters, strict=True)])
        for opened, outcome in zip(passes, outcomes, strict=True):
            set_outputs(opened, outcome.logprobs)

    def _run(self, jobs: Sequence[TrainJob]) -> list[TrainOutcome]:
        outcomes = self.core.forward_backward(jobs)
        raise_failures(outcomes)
        return [outcome for outcome in outcomes if isinstance(outcome, TrainOutcome)]

    def _logits(self, tokens: Sequence[torch.Tensor], adapter: LoraAdapter) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        for row_N in tokens:
            tokens_N = row_N.to(self.core.device)
            positions_N = torch.arange(len(tokens_N), device=self.core.device)
            segments = [Segment(adapter, 0, len(tokens_N))]
            hidden_NH = self.core.run_packed(tokens_N, positions_N, segments, CausalSpans([(0, len(tokens_N))]))
            rows.append(self.core.logits(hidden_NH, segments).cpu())
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
        adapter = self._adapters[group.name]
        loaded = import_adapter(self.core.pool, read_files(folder), with_optimizer=False, trainable=False)
        if loaded.layout.shapes != adapter.layout.shapes:
            raise InvalidInput("checkpoint", f"{folder} holds an adapter of other layers or ranks than {group.name!r}")
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
        return outgoing_fused(self.core.base_weights(), adapter)

    def get_peft_config_dict(self, *, adapter_name: str = "") -> dict[str, Any]:
        """The adapter's config as PEFT has it."""
        config: dict[str, Any] = json.loads(
            write_settings(self._adapters[self.group(adapter_name).name], self.model_id)
        )
        return config
