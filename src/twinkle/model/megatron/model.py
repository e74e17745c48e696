"""A model by Megatron's core, spread over ranks by tensors, layers, sequences and experts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoConfig

from twinkle.core.errors import InvalidInput
from twinkle.data_format.answers import SavedCheckpoint
from twinkle.hub.trust import naming_code, open_model
from twinkle.infra import DeviceMesh
from twinkle.infra.runtime import mesh_of, runtime
from twinkle.model.loading import stored_paths
from twinkle.model.megatron.adapted import AdaptedModel
from twinkle.model.megatron.build import build_stages, mark_partial_gradients, named_buffers, named_parameters, tie
from twinkle.model.megatron.config import distributes_optimizer, transformer_config
from twinkle.model.megatron.families import family_of
from twinkle.model.megatron.gradients import MegatronRanks, spread_of
from twinkle.model.megatron.layout import Layout, mesh_or_alone
from twinkle.model.megatron.masters import Masters
from twinkle.model.megatron.optimizer import megatron_optimizer
from twinkle.model.megatron.pipeline import Pipeline
from twinkle.model.megatron.scheduler import OptimizerParamScheduler
from twinkle.model.megatron.training_files import (
    load_open_window,
    load_optimizer_state,
    open_window_files,
    optimizer_state_files,
)
from twinkle.model.megatron.weights.convert import PublishedFolder, fill, published
from twinkle.model.megatron.weights.files import save_published
from twinkle.model.megatron.weights.rules import WeightTable
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.optimizers import DEFAULT_LR, DEFAULT_WEIGHT_DECAY, OptimizerArg
from twinkle.model.outgoing import NamedWeights
from twinkle.model.placement import MixedPrecision, device_of, weights_dtype

DEFAULT_SCHEDULE = "default"
TABLES = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})


class MegatronModel(AdaptedModel):
    """A causal language model with tensor, pipeline, virtual pipeline, context and expert parallelism.

    All parameters are trained, in the group ``""``. Every rank makes every call; ranks of the same ``dp`` index bring
    the same rows, and every rank gets the outputs of its rows. Checkpoints are what transformers reads, whatever the
    mesh.

    Args:
        model_id: A folder, ``ms://org/name``, ``hf://org/name`` or ``org/name``, each with ``@revision``.
        config: A transformers config in place of the model's own.
        ddp_config: Megatron's settings of data parallelism: ``use_distributed_optimizer`` counts, others set nothing.
        device_mesh: The layout; that of ``initialize`` if omitted. A process keeps the first one's.
        mixed_precision: ``bf16`` (the default on accelerators) keeps weights in bfloat16 and steps a float32 copy of
            them; ``no`` keeps float32.
        load_weights: Read the model's weights; else they are drawn anew.
        recompute_granularity, recompute_method, recompute_num_layers, recompute_modules: Megatron's, what is computed
            again in the backward pass instead of kept.
        use_distributed_optimizer: Spread the optimizer's state over data ranks.
        megatron_settings: Further fields of Megatron's TransformerConfig, over what the model's config says.
    """

    _saves_merged = False

    def __init__(
        self,
        model_id: str | None = None,
        config: Any = None,
        ddp_config: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision | None = None,
        load_weights: bool = True,
        recompute_granularity: str | None = "full",
        recompute_method: str | None = "uniform",
        recompute_num_layers: int | None = 1,
        recompute_modules: Sequence[str] | None = None,
        *,
        use_distributed_optimizer: bool = True,
        **megatron_settings: Any,
    ) -> None:
        super().__init__()
        if model_id is None:
            raise InvalidInput("model_id", "is missing; send a folder or an id of a hub")
        self._is_distributed = distributes_optimizer(ddp_config, use_distributed_optimizer)
        device_mesh = mesh_of(device_mesh)
        device = device_of(device_mesh)
        dtype = weights_dtype(mixed_precision, device)
        self.model_id, keywords = open_model(model_id, megatron_settings)
        keywords.pop("trust_remote_code", None)
        self.hf_config: Any = _read_config(self.model_id) if config is None else config
        self._text_config = self.hf_config.get_text_config()
        family = family_of(self._text_config)
        self.layout = Layout(mesh_or_alone(device_mesh, device), device, seed=runtime().seed)
        self.config = transformer_config(
            self._text_config,
            family,
            self.layout,
            dtype=dtype,
            is_filled=load_weights,
            keywords={
                "recompute_granularity": recompute_granularity,
                "recompute_method": recompute_method if recompute_granularity == "full" else None,
                "recompute_num_layers": recompute_num_layers if recompute_granularity == "full" else None,
                **({} if recompute_modules is None else {"recompute_modules": list(recompute_modules)}),
                **keywords,
            },
            own_names=frozenset(inspect.signature(MegatronModel.__init__).parameters),
        )
        stages = build_stages(self.config, self._text_config, family, self.layout)
        mark_partial_gradients(stages)
        self.pipeline = Pipeline([stage.to(device) for stage in stages], self.layout, self._text_config.vocab_size)
        self.model = torch.nn.ModuleList(self.pipeline.stages)
        """What patches see: this rank's stages."""
        folder = PublishedFolder(Path(self.model_id)) if load_weights else None
        rules = family.rules(self._text_config, is_fused=folder is not None and folder.fuses_experts)
        self._table = WeightTable(rules, stored_paths(self.model_id))
        self._weights = named_parameters(stages, self.layout)
        self._buffers = named_buffers(stages, self.layout)
        if folder is not None:
            fill({**self._weights, **self._buffers}, self._table, folder, self.layout)
        else:
            tie(stages, self.layout)
        self._sync = MegatronRanks(self.layout)
        self._masters = Masters(self._weights)
        self._sync.note(
            self._masters.parameters,
            {name: spread_of(name, each, self._table) for name, each in self._weights.items()},
        )
        self.optimizer_group[""] = OptimizerGroup("", self._masters.parameters, self._sync)

    # Settings.

    def set_optimizer(
        self,
        optimizer_cls: OptimizerArg = "default",
        *,
        lr: float = DEFAULT_LR,
        weight_decay: float = DEFAULT_WEIGHT_DECAY,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set the optimizer, one of ``torch.optim``; ``default``, ``MegatronOptimizer`` and ``Adam`` mean AdamW."""
        group = self.group(adapter_name)
        group.optimizer = megatron_optimizer(
            optimizer_cls,
            group.parameters,
            self.layout,
            is_distributed=self._is_distributed,
            lr=lr,
            weight_decay=weight_decay,
            tables=self._embedding_tables(group),
            **settings,
        )
        group.scheduler = None

    def set_lr_scheduler(
        self,
        scheduler_cls: str | LRScheduler | Callable[..., LRScheduler] = DEFAULT_SCHEDULE,
        *,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set the schedule: ``default`` and ``OptimizerParamScheduler`` are Megatron's, others ours or torch's."""
        if scheduler_cls in (DEFAULT_SCHEDULE, OptimizerParamScheduler.__name__):
            scheduler_cls = OptimizerParamScheduler
        super().set_lr_scheduler(scheduler_cls, adapter_name=adapter_name, **settings)

    def _embedding_tables(self, group: OptimizerGroup) -> frozenset[str]:
        return TABLES & group.parameters.keys()

    # A step.

    def _collect_gradients(self, group: OptimizerGroup) -> None:
        """Those of adapters are where they belong."""
        self._masters.collect()

    def _clear_gradients(self, group: OptimizerGroup) -> None:
        for parameter in group.parameters.values():
            parameter.grad = None

    def _publish(self, group: OptimizerGroup) -> None:
        self._masters.publish()

    def _mark_gradients(self, group: OptimizerGroup) -> None:
        """Gradients are where they belong."""

    # Files.

    def _write_weights(self, group: OptimizerGroup, folder: Path, *, is_writer: bool) -> None:
        if group.name and not self._saves_merged:
            self._write_adapter(group, folder, is_writer=is_writer)
            return
        state = dict(self.send_weights(adapter_name=group.name))
        if is_writer:
            if self.hf_config is not self._text_config:
                state |= PublishedFolder(Path(self.model_id)).others(state)
            save_published(folder, state, self.hf_config, Path(self.model_id))

    def _load_weights(self, group: OptimizerGroup, folder: Path) -> None:
        if group.name:
            self._fill(self._adapters[group.name], folder)
            return
        fill({**self._weights, **self._buffers}, self._table, PublishedFolder(folder), self.layout)
        self._masters.refresh()

    def _optimizer_files(self, group: OptimizerGroup) -> dict[str, bytes]:
        group.gather_window()
        files = optimizer_state_files(group.require_optimizer(), group.parameters, self._rules(group), self.layout)
        return files | open_window_files(
            group.parameters, self._rules(group), self.layout, num_open=group.num_open, num_tokens=group.num_tokens
        )

    def _load_optimizer(self, group: OptimizerGroup, files: Mapping[str, bytes]) -> None:
        load_optimizer_state(group.require_optimizer(), group.parameters, self._rules(group), self.layout, files)

    def _load_window(self, group: OptimizerGroup, files: Mapping[str, bytes]) -> tuple[int, int]:
        return load_open_window(group.parameters, self._rules(group), self.layout, files)

    def save(
        self,
        name: str | None = None,
        output_dir: str | Path | None = None,
        interval: int = 1,
        save_optimizer: bool = False,
        consumed_train_samples: int | None = None,
        merge_lora: bool = False,
        *,
        adapter_name: str = "",
    ) -> SavedCheckpoint | None:
        """Write a checkpoint, as every model does; with ``merge_lora`` the whole model, the adapter's update in it.

        Raises:
            InvalidInput: ``merge_lora`` goes with ``save_optimizer``, or there is no adapter to merge.
        """
        if merge_lora and save_optimizer:
            raise InvalidInput("merge_lora", "goes with no optimizer: what is merged is trained no further; save twice")
        if merge_lora and not self.group(adapter_name).name:
            raise InvalidInput("merge_lora", "there is no adapter; leave it out")
        self._saves_merged = merge_lora
        try:
            return super().save(
                name, output_dir, interval, save_optimizer, consumed_train_samples, adapter_name=adapter_name
            )
        finally:
            self._saves_merged = False

    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, torch.Tensor]:
        """The adapter's weights by PEFT's names, or all by transformers', on rank 0; on others none. All must ask."""
        group = self.group(adapter_name)
        if group.name:
            return self._adapter_state(group)
        return dict(published({**self._weights, **self._buffers}, self._table, self.layout))

    def send_weights(self, *, adapter_name: str = "", merge: bool = True) -> NamedWeights:
        """All weights by transformers' names, the adapter's update in them or left out, on rank 0; all must iterate."""
        change = self._merging(self.group(adapter_name), merge=merge)
        return published({**self._weights, **self._buffers}, self._table, self.layout, change)


def _read_config(folder: str) -> Any:
    # Layers are Megatron's, whoever trusts a model's own code.
    with naming_code(folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
