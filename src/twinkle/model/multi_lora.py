"""Many adapters on one frozen base model, under the names that training scripts use.

The work is the fused engine's (``FusedLoraModel``), the calls are ``FusedComponent``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft

from twinkle.checkpoint_engine.directory import read_files
from twinkle.checkpoint_engine.peft import import_adapter
from twinkle.core.errors import InvalidInput, NoRoom
from twinkle.core.process.events import event_log
from twinkle.hub.image_processor import load_image_processor
from twinkle.hub.trust import naming_code, open_model
from twinkle.infra import DeviceMesh
from twinkle.infra.remote import remote_function
from twinkle.infra.runtime import mesh_of
from twinkle.model.checkpoint import find_checkpoint
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.parameters import parameters_of
from twinkle.model.fused_component import FusedComponent
from twinkle.model.grad_scaler import make_scaler
from twinkle.model.loading import load_base_model, stored_paths, takes_pictures
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.parallel.gradient_sync import sync_of
from twinkle.model.parallel.settings import FsdpSettings, check_ddp, check_strategy
from twinkle.model.peft_config import ALL_LINEAR, lora_config_of, read_slots
from twinkle.model.placement import (
    MixedPrecision,
    ModelArguments,
    attention_for,
    device_of,
    model_class,
    weights_dtype,
)
from twinkle.module.lora import LoraConfig

log = event_log()


class MultiLoraTransformersModel(FusedComponent):
    """A frozen base model with room for ``max_loras`` adapters of rank up to ``max_r``.

    Args:
        model_id: A folder, ``ms://org/name``, ``hf://org/name`` or ``org/name``, each with ``@revision``. By position
            ``model_cls`` may come before it.
        model_cls: The transformers class to load it with, or its name; the causal language model of its config if
            omitted.
        strategy, ddp_config, fsdp_config, memory_efficient_init: As for ``TransformersModel``; here none has something
            to set.
        lora_config: A ``peft.LoraConfig`` or its settings, of the slots: its ``r`` stands for ``max_r``, its
            ``target_modules`` for ``target_modules``. All else is each adapter's own.
        grad_scaler_config: Torch's GradScaler's; nothing is scaled here, since there is no ``fp16``.
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
        model_id: Any = None,
        config: Any = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision | None = None,
        *,
        model_cls: Any = None,
        strategy: str = "accelerate",
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        lora_config: peft.LoraConfig | Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        max_loras: int = 5,
        max_r: int = 32,
        max_length: int = 8192,
        target_modules: str | Sequence[str] = ALL_LINEAR,
        tokens_per_pass: int | None = None,
        **from_pretrained_kwargs: Any,
    ) -> None:
        given = ModelArguments.of(model_cls, model_id, config, device_mesh, mixed_precision)
        check_strategy(strategy)
        check_ddp(ddp_config)
        FsdpSettings.of(fsdp_config)
        slots = read_slots(lora_config, max_r=max_r, target_modules=target_modules)
        prepare_environment()
        device_mesh = mesh_of(given.device_mesh)
        device = device_of(device_mesh)
        sync = sync_of(device_mesh, device)
        folder, settings = open_model(given.model_id, attention_for(device, from_pretrained_kwargs))
        self.max_loras, self.max_r = max_loras, slots.max_r
        self.target_modules = slots.target_modules
        dtype = weights_dtype(given.mixed_precision, device)
        image_processor = load_image_processor(folder) if takes_pictures(folder) else None
        model: Any
        if given.model_cls is None and given.config is None and settings == {"trust_remote_code": False}:
            model = load_base_model(folder, name=folder, dtype=dtype, with_tower=image_processor is not None)
        else:
            loader = model_class(given.model_cls)
            own_config = {} if given.config is None else {"config": given.config}
            with naming_code(given.model_id):
                model = loader.from_pretrained(folder, **own_config, **{"dtype": dtype, **settings})
        core = FusedLoraModel(
            model.to(device),
            name=folder,
            tokens_per_pass=tokens_per_pass,
            image_processor=image_processor,
            paths=stored_paths(folder),
        )
        super().__init__(core, model_id=folder, max_length=max_length)
        self._sync = sync
        if grad_scaler_config is not None:
            self._check_scaler(grad_scaler_config)

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
                self.core.pool,
                read_files(find_checkpoint(config_or_dir, field="config_or_dir")),
                with_optimizer=False,
                trainable=is_trainable,
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

    @remote_function(dispatch="all", collect="first")
    def remove_adapter(self, adapter_name: str) -> None:
        """Forget an adapter and everything set for it; its slot is free again."""
        group = self.group(adapter_name)
        group.forwarding.close()
        del self.optimizer_group[group.name], self._adapters[group.name]

    @remote_function(dispatch="all", collect="first")
    def set_grad_scaler(self, *, adapter_name: str = "", **settings: Any) -> None:
        """Taken and checked; nothing is scaled, since adapters are float32 and passes never ``fp16``."""
        self.group(adapter_name)
        self._check_scaler(settings)

    def _check_scaler(self, settings: Mapping[str, Any]) -> None:
        make_scaler(self.core.device, settings)
        log.info("model.scaler.without_effect", settings=sorted(settings), next="nothing is scaled: there is no fp16")

    def _require_rank(self, config: LoraConfig) -> None:
        rank = max([config.rank, *(module.rank for module in config.modules or ())])
        if rank > self.max_r:
            raise NoRoom(f"r: is {rank}, max_r is {self.max_r}; lower it, or load the model with a larger max_r")
