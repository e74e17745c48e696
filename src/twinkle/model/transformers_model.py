"""One transformers model as it is: all its parameters trained, or PEFT adapters on it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from peft import PeftModel
from torch.utils.hooks import RemovableHandle

from twinkle.checkpoint_engine.peft_tensors import published_key
from twinkle.checkpoint_engine.sharded import whole
from twinkle.core.errors import InvalidInput
from twinkle.hub.caches import published_id
from twinkle.hub.trust import naming_code, open_model
from twinkle.infra import DeviceMesh
from twinkle.infra.remote import remote_function
from twinkle.infra.runtime import mesh_of
from twinkle.model.checkpoint import find_checkpoint
from twinkle.model.float8 import check_float8, use_float8
from twinkle.model.grad_scaler import load_scaler, make_scaler, scaler_files
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.optimizers import OptimizerArg
from twinkle.model.outgoing import NamedWeights, outgoing_weights
from twinkle.model.parallel.experts import share_experts, step_one_by_one
from twinkle.model.parallel.sequence import sequence_parallel
from twinkle.model.parallel.settings import FsdpSettings, check_ddp, check_strategy
from twinkle.model.peft_config import leave_out_grouped
from twinkle.model.placement import (
    MixedPrecision,
    ModelArguments,
    attention_for,
    compute_dtype,
    device_of,
    load_model_on,
    model_class,
    shard,
    training_sync,
)
from twinkle.model.plain_passes import PlainPasses
from twinkle.model.transformers.moe.router_replay import RouterReplay
from twinkle.model.weight_files import (
    adapter_parameters,
    load_adapter,
    load_model,
    paths_of,
    renamed_settings,
    save_adapter,
    save_model,
)


class TransformersModel(PlainPasses):
    """A transformers model, with torch's optimizers and schedules, on a CPU or CUDA, on one rank or several.

    Without an adapter all parameters are trained, in the group ``""``. The first adapter freezes the base model and
    takes that group's place.

    Args:
        model_id: A folder, ``ms://org/name``, ``hf://org/name`` or ``org/name``, each with ``@revision``. By position
            ``model_cls`` may come before it.
        config: A transformers config in place of the model's own.
        device_mesh: ``dp`` replicates the model, ``fsdp`` shards it (FSDP2); every rank brings its own rows, the ranks
            of ``ulysses_size`` the same ones; those of ``ep_size`` share experts. That of ``initialize`` if omitted.
        mixed_precision: ``bf16`` (the default on accelerators) makes products in bfloat16, ``fp16`` in float16
            with a scaled loss, ``fp8`` those of linear layers in float8 (torchao, on GPUs that can) and others in
            bfloat16, ``no`` as weights are.
        model_cls: The transformers class to load it with, or its name; the causal language model of its config if
            omitted.
        strategy: ``accelerate`` or ``native_fsdp``: there is one way, and both names mean it.
        ddp_config: accelerate's settings of data parallelism: none has something to set here, unknown ones are refused.
        fsdp_config: ``reshard_after_forward``, ``cpu_offload``, ``expert_parallel``; accelerate's others set nothing.
        grad_scaler_config: Torch's GradScaler's, for ``fp16``.
        memory_efficient_init: Changes nothing: on a mesh with ``fsdp`` each rank reads its share of the weights alone,
            except with ``ep_size``, ``cpu_offload`` or ``fp8``, from other files than safetensors, or where the class
            has weights that these lack; else it reads one tensor at a time.
        gradient_checkpointing: Compute activations again in the backward pass instead of keeping them.
        enable_router_replay: Whether ``router_replay_action`` means something; without it every pass routes anew.
        from_pretrained_kwargs: For transformers; ``dtype`` is float32 if omitted.
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
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        gradient_checkpointing: bool = True,
        enable_router_replay: bool = True,
        **from_pretrained_kwargs: Any,
    ) -> None:
        super().__init__()
        given = ModelArguments.of(model_cls, model_id, config, device_mesh, mixed_precision)
        check_strategy(strategy)
        device_mesh = mesh_of(given.device_mesh)
        self.device = device_of(device_mesh)
        self._mesh = device_mesh
        self._compute_dtype = compute_dtype(given.mixed_precision, self.device)
        if given.mixed_precision == "fp8":
            check_float8(self.device)
        self._scaler_settings = dict(grad_scaler_config or {})
        make_scaler(self.device, self._scaler_settings)
        self._hooks: dict[str, RemovableHandle] = {}
        self._may_replay = enable_router_replay
        self._routers: RouterReplay | None = None
        check_ddp(ddp_config)
        self._fsdp_settings = FsdpSettings.of(fsdp_config)
        self._sync = training_sync(device_mesh, self.device)
        self._is_sharded = False
        self._frozen: set[str] = set()
        self.model_id, settings = open_model(given.model_id, attention_for(self.device, from_pretrained_kwargs))
        settings = {**({} if given.config is None else {"config": given.config}), "dtype": torch.float32, **settings}
        with naming_code(given.model_id):
            self.model: Any = load_model_on(
                model_class(given.model_cls),
                self.model_id,
                # Offloaded shares are not where a mesh of GPUs has its tensors, and layers are exchanged while whole.
                None if self._fsdp_settings.cpu_offload or given.mixed_precision == "fp8" else device_mesh,
                self.device,
                **settings,
            )
        if given.mixed_precision == "fp8":
            use_float8(self.model)
        # What adapters name as their base, in files that travel.
        self.model.name_or_path = published_id(self.model_id)
        self._paths = paths_of(self.model, self.model_id)
        self._sequences = sequence_parallel(self.model, device_mesh)
        self._experts = share_experts(self.model, device_mesh, self._fsdp_settings.expert_parallel)
        if self._experts is not None:
            self._sync = self._sync.with_experts(self._experts)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._add_group("", dict(self.model.named_parameters()))

    def _add_group(
        self, name: str, parameters: Mapping[str, torch.nn.Parameter], gradient_accumulation_steps: int = 1
    ) -> None:
        group = OptimizerGroup(name, parameters, self._sync, gradient_accumulation_steps=gradient_accumulation_steps)
        if self._compute_dtype == torch.float16:
            group.scaler = make_scaler(self.device, self._scaler_settings)
        self.optimizer_group[name] = group

    # Adapters.

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1, is_trainable: bool = True
    ) -> None:
        """Add a PEFT adapter by its config, or from a directory.

        Raises:
            InvalidInput: The name is taken or empty, PEFT refuses the config, or the weights are sharded already.
        """
        if not adapter_name or adapter_name in self.optimizer_group:
            raise InvalidInput(
                "adapter_name", f"{adapter_name!r} is {'taken' if adapter_name else 'empty'}; send another"
            )
        if self._is_sharded:
            raise InvalidInput("adapter_name", "the weights are sharded; add adapters before set_optimizer and passes")
        try:
            self._attach(adapter_name, config_or_dir, is_trainable=is_trainable)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise InvalidInput("config_or_dir", f"PEFT cannot make adapter {adapter_name!r}: {error}") from error
        if self._experts is not None:
            self._experts.adapt(self.model)
        if not is_trainable:
            self._frozen.add(adapter_name)
        parameters = self._parameters(adapter_name)
        self._sync.share(parameters.values())
        self.optimizer_group.pop("", None)
        self._add_group(adapter_name, parameters, gradient_accumulation_steps)

    def _attach(self, adapter_name: str, config_or_dir: Any, *, is_trainable: bool) -> None:
        is_folder = isinstance(config_or_dir, (str, Path))
        folder = find_checkpoint(config_or_dir, field="config_or_dir") if is_folder else None
        config = copy.deepcopy(config_or_dir) if folder is None else peft.PeftConfig.from_pretrained(str(folder))
        if folder is not None:
            config.inference_mode = not is_trainable
        for name, value in renamed_settings(vars(config), self._paths.within).items():
            setattr(config, name, value)
        leave_out_grouped(config, self.model)
        if isinstance(self.model, PeftModel):
            self.model.add_adapter(adapter_name, config)
        else:
            self.model = peft.get_peft_model(self.model, config, adapter_name=adapter_name)
        if folder is not None:
            load_adapter(folder, adapter_parameters(self.model, adapter_name, self._paths), self._paths)
        self.model.to(self.device)

    @remote_function(dispatch="all", collect="first")
    def remove_adapter(self, adapter_name: str) -> None:
        """Forget an adapter and everything set for it."""
        group = self.group(adapter_name)
        self._require_adapter(group)
        if len(self.optimizer_group) == 1:
            raise InvalidInput("adapter_name", f"{group.name!r} is the last adapter; load the model again instead")
        group.forwarding.close()
        del self.optimizer_group[group.name]
        self.model.delete_adapter(group.name)

    def _parameters(self, adapter_name: str) -> dict[str, torch.nn.Parameter]:
        if adapter_name in self._frozen:
            return {}
        return self._stored_parameters(adapter_name)

    def _stored_parameters(self, adapter_name: str) -> dict[str, torch.nn.Parameter]:
        if adapter_name:
            return adapter_parameters(self.model, adapter_name, self._paths)
        return dict(self.model.named_parameters())

    @staticmethod
    def _require_adapter(group: OptimizerGroup) -> None:
        if not group.name:
            raise InvalidInput("adapter_name", "there is no adapter; all parameters are trained")

    def set_optimizer(
        self,
        optimizer_cls: OptimizerArg = "AdamW",
        *,
        lr: float = 1e-5,
        weight_decay: float = 0.01,
        adapter_name: str = "",
        **settings: Any,
    ) -> None:
        """Set the optimizer, one of ``torch.optim``; on a mesh with ``fsdp`` this shards the weights."""
        self._shard_once()
        super().set_optimizer(optimizer_cls, lr=lr, weight_decay=weight_decay, adapter_name=adapter_name, **settings)
        if self._experts is not None:
            step_one_by_one(self.group(adapter_name).require_optimizer())

    def _embedding_tables(self, group: OptimizerGroup) -> frozenset[str]:
        tables = [module.weight for module in self.model.modules() if isinstance(module, torch.nn.Embedding)]
        unembedding = self.model.get_output_embeddings()
        found = {id(weight) for weight in [*tables, *([] if unembedding is None else [unembedding.weight])]}
        return frozenset(
            name for name, weight in group.parameters.items() if id(weight) in found or "lora_embedding_" in name
        )

    @remote_function(dispatch="all", collect="first")
    def set_grad_scaler(self, *, adapter_name: str = "", **settings: Any) -> None:
        """Scale losses by torch's GradScaler, built with these settings over ``grad_scaler_config``."""
        self.group(adapter_name).scaler = make_scaler(self.device, {**self._scaler_settings, **settings})

    def register_mm_forward_hook(self, optimizer_group: OptimizerGroup) -> None:
        """Let the group's template see what goes into the model (``pre_forward_hook``); for templates that have one."""
        group = optimizer_group
        if not hasattr(group.template, "pre_forward_hook"):
            raise InvalidInput("template", f"{type(group.template).__name__} has no pre_forward_hook to register")
        self.unregister_mm_forward_hook(group)
        self._hooks[group.name] = self.model.register_forward_pre_hook(
            group.template.pre_forward_hook,  # type: ignore[union-attr]
            with_kwargs=True,
        )

    def unregister_mm_forward_hook(self, optimizer_group: OptimizerGroup) -> None:
        """Take the hook away."""
        if optimizer_group.name in self._hooks:
            self._hooks.pop(optimizer_group.name).remove()

    @remote_function(dispatch="all", collect="first")
    def reload_initial_weights(self) -> None:
        """Make all parameters what they were at the start; the optimizer, its schedule and the window are forgotten.

        Raises:
            InvalidInput: There are adapters: the base model beneath them has not changed.
        """
        group = self.optimizer_group.get("")
        if group is None:
            raise InvalidInput("adapter_name", "the base model has not changed; remove the adapter and add it again")
        self._load_weights(group, Path(self.model_id))
        self._clear_gradients(group)
        group.clear_window()
        group.optimizer, group.scheduler, group.last, group.cur_step = None, None, None, 0

    def _shard_once(self) -> None:
        if self._is_sharded or self._mesh is None or self._mesh.size("fsdp") == 1:
            return
        if self._compute_dtype == torch.float16 and self._experts is not None:
            # Whether a gradient is finite is found out by those that share a weight, and others share experts.
            raise InvalidInput("mixed_precision", "is 'fp16', which is not for shared experts; send 'bf16' or 'no'")
        shard(self.model, self._mesh, dtype=self._compute_dtype, settings=self._fsdp_settings, experts=self._experts)
        self._is_sharded = True
        for group in self.optimizer_group.values():
            group.parameters = self._parameters(group.name)

    # The end of a window.

    def _clear_gradients(self, group: OptimizerGroup) -> None:
        for parameter in group.parameters.values():
            parameter.grad = None

    def _publish(self, group: OptimizerGroup) -> None:
        """The optimizer works on the model's own parameters."""

    def _mark_gradients(self, group: OptimizerGroup) -> None:
        """Gradients are where they belong."""

    # Files.

    def _write_weights(self, group: OptimizerGroup, folder: Path, *, is_writer: bool) -> None:
        state = self.get_state_dict(adapter_name=group.name)
        if not is_writer:
            return
        if group.name:
            save_adapter(folder, state, self.get_peft_config_dict(adapter_name=group.name))
        else:
            save_model(folder, state, self.model)

    def _optimizer_files(self, group: OptimizerGroup) -> dict[str, bytes]:
        scale = {} if group.scaler is None else scaler_files(group.scaler)
        return super()._optimizer_files(group) | scale

    def _load_optimizer(self, group: OptimizerGroup, files: Mapping[str, bytes]) -> None:
        super()._load_optimizer(group, files)
        if group.scaler is not None:
            load_scaler(group.scaler, files)

    def _load_weights(self, group: OptimizerGroup, folder: Path) -> None:
        self._shard_once()
        parameters = self._stored_parameters(group.name)
        if group.name:
            load_adapter(folder, parameters, self._paths)
        else:
            optional = {*self.model.all_tied_weights_keys, *dict(self.model.named_buffers())}
            load_model(folder, parameters, optional=frozenset(optional), model=self.model)

    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, torch.Tensor]:
        """The adapter's weights by PEFT's names, or all of the model's; on a mesh every rank must ask."""
        group = self.group(adapter_name)
        state = {name: whole(tensor.detach()) for name, tensor in self.model.state_dict().items()}
        if not group.name:
            return state
        found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
            self.model, state_dict=state, adapter_name=group.name, save_embedding_layers=False
        )
        return {published_key(name, self._paths): tensor.clone() for name, tensor in found.items()}

    def send_weights(self, *, adapter_name: str = "", merge: bool = True) -> NamedWeights:
        """All weights by transformers' names, the adapter's update in them or left out; every rank must iterate."""
        return outgoing_weights(self.model, self.group(adapter_name).name, merge=merge)

    def get_peft_config_dict(self, *, adapter_name: str = "") -> dict[str, Any]:
        """The adapter's config as PEFT writes it; empty where all parameters are trained."""
        group = self.group(adapter_name)
        if not group.name:
            return {}
        config = copy.deepcopy(self.model.peft_config[group.name])
        config.inference_mode = True
        settings: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=_jsonable))
        return renamed_settings(settings, self._paths.stored)


def _jsonable(value: object) -> object:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
