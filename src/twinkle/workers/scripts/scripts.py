"""Calls of the Twinkle dialect on the adapters of a mesh, by the code that a script's own process has for them.

What a client sends are names and JSON: no object, no function, no path. A plugin's id counts where the operator trusts
it, by id and revision (``twinkle.plugin``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
import torch

from twinkle.checkpoint_engine.packing import Packer
from twinkle.checkpoint_engine.peft import export_adapter, import_adapter
from twinkle.checkpoint_engine.snapshot import PackedScript
from twinkle.checkpoint_engine.training_state import (
    TrainerState,
    load_optimizer_settings,
)
from twinkle.core.adapter import AdapterConfig
from twinkle.core.errors import CallFailed, InvalidInput
from twinkle.core.file_names import OPTIMIZER_SETTINGS_FILE, TRAINER_FILE
from twinkle.core.model_names import plain_model_name
from twinkle.model.fused.core import LoraCore
from twinkle.model.fused.parameters import note_steps, parameters_of, set_steps
from twinkle.model.fused_component import FusedComponent
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.parallel.gradient_sync import OneRank
from twinkle.model.peft_config import lora_config_from
from twinkle.model.script_state import METRIC, Script, Setting
from twinkle.module.lora import LoraAdapter
from twinkle.plugin.loading import require_approved
from twinkle.wire.calls import Call

NAME = "default"
"""What the one adapter is called that a call is about."""
MAX_STATE_CELLS = 1 << 20
"""Of ``get_state_dict``: numbers as JSON."""

_COMPONENTS = {
    "set_loss": "loss_cls",
    "set_optimizer": "optimizer_cls",
    "set_lr_scheduler": "scheduler_cls",
    "set_template": "template_cls",
    "set_processor": "processor_cls",
    METRIC: "metric_cls",
}
_STEPS = frozenset({"step", "clip_grad_and_step", "zero_grad", "lr_step"})
_OF_THE_CLIENT = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, AssertionError)


class Scripts(FusedComponent):
    """One adapter at a time: whatever is called is called on the one that is bound."""

    _why_no_patch = "would change the base model, which all tenants of this mesh share; run a model of your own for it"

    def __init__(self, core: LoraCore, *, folder: str, served_name: str) -> None:
        super().__init__(core, model_id=folder, max_length=sys.maxsize)
        self._served_name = served_name

    # Adapters.

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1, is_trainable: bool = True
    ) -> None:
        """Refused: ``create`` makes the adapters of a mesh."""
        raise InvalidInput("adapter_name", "an adapter is made with its run; begin another run for another one")

    def create(self, config: AdapterConfig) -> Script:
        """A fresh adapter by its PEFT config, wholly determined by ``config``."""
        settings = {"lora_alpha": config.alpha, **(config.peft or {})}
        lora = lora_config_from(settings, self.core.pool.targets, rank=config.rank, seed=config.seed)
        return self.dress(self.core.create_adapter(lora), config.gradient_accumulation_steps)

    def files_of(self, adapter: LoraAdapter, *, with_optimizer: bool) -> dict[str, bytes]:
        """What a checkpoint of it holds, as tools at home read it."""
        return export_adapter(adapter, self._served_name, with_optimizer=with_optimizer)

    def adapter_of(self, files: Mapping[str, bytes], *, with_optimizer: bool, trainable: bool = True) -> LoraAdapter:
        """What such a checkpoint holds.

        Raises:
            InvalidInput: It is another model's, or lacks what is asked for.
        """
        return import_adapter(self.core.pool, files, with_optimizer=with_optimizer, trainable=trainable)

    def dress(self, adapter: LoraAdapter, gradient_accumulation_steps: int = 1) -> Script:
        """An adapter for which nothing is set yet."""
        group = OptimizerGroup(
            NAME,
            parameters_of(adapter),
            OneRank(),
            gradient_accumulation_steps=gradient_accumulation_steps,
            keeps_records=False,
        )
        return Script(adapter=adapter, group=group)

    def restore(self, adapter: LoraAdapter, packed: PackedScript) -> Script:
        """The script of a snapshot, around the adapter of the snapshot."""
        script = self.dress(adapter)
        with self.bound(script):
            script.take(packed, self._make, lambda: self.core.embedding)
        return script

    @contextmanager
    def bound(self, script: Script) -> Iterator[None]:
        """What is called within is called on this adapter."""
        self.optimizer_group = {NAME: script.group}
        self._adapters = {NAME: script.adapter}
        try:
            yield
        finally:
            self.optimizer_group, self._adapters = {}, {}

    # Calls.

    def call(self, script: Script, call: Call) -> bytes:
        """Do what a call says that needs no pass; the response's JSON body.

        Raises:
            InvalidInput: It cannot be done; the adapter is unchanged.
            CallFailed: It broke half-way.
        """
        with self.bound(script):
            if call.method in _COMPONENTS:
                self._set(script, call)
                return b"null"
            if call.method in _STEPS:
                if call.method in ("step", "clip_grad_and_step"):
                    # Before anything is clipped.
                    script.group.require_optimizer()
                _attempt(call, getattr(self, call.method))
                return b"null"
            return self._answer(script, call)

    def _answer(self, script: Script, call: Call) -> bytes:
        match call.method:
            case "calculate_loss":
                kwargs = loss_keywords(call.arguments)
                return body_of(_attempt(Call(method=call.method, arguments=kwargs), self.calculate_loss))
            case "clip_grad_norm":
                return body_of(str(_attempt(call, self.clip_grad_norm)))
            case "calculate_metric":
                return body_of(dict(_attempt(call, self.calculate_metric)))
            case "get_train_configs":
                return body_of(self.get_train_configs())
            case "get_state_dict":
                return body_of(self._state_as_lists(script))
            case "save":
                consumed = call.arguments.get("consumed_train_samples")
                if consumed is not None:
                    script.group.consumed_train_samples = int(consumed)
                return b"null"
            case "apply_patch":
                raise InvalidInput("patch_cls", f"{call.arguments.get('patch_cls')!r} {self._why_no_patch}")
            case _:
                raise InvalidInput("method", f"{call.method} is not known here")

    def _set(self, script: Script, call: Call) -> None:
        field = _COMPONENTS[call.method]
        name = call.arguments.get(field, "InputProcessor" if call.method == "set_processor" else None)
        if call.method == "set_optimizer" and name is None:
            name = "AdamW"
        if not isinstance(name, str):
            raise InvalidInput(field, f"must be the name of a class of ours, not {type(name).__name__}")
        require_approved(field, name)
        setting = Setting(method=call.method, arguments={**call.arguments, field: name})
        self._make(setting)
        if call.method == METRIC:
            # One that cannot be stored would be found out too late.
            Packer().pack(script.group.metrics.states())
        script.note(setting)

    def _make(self, setting: Setting) -> None:
        """Make a call that sets something."""
        arguments = dict(setting.arguments)
        if setting.method == "set_template":
            self._judge_template(arguments)
        elif setting.method == "set_optimizer":
            arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
        component = arguments.pop(_COMPONENTS[setting.method])
        call = Call(method=setting.method, arguments=arguments)
        _attempt(call, getattr(self, setting.method), component, changes=False)

    def _judge_template(self, arguments: dict[str, Any]) -> None:
        """Of this mesh's model alone: another one's tokens mean other words."""
        model = arguments.pop("model_id", None)
        if model is not None and plain_model_name(str(model)) != plain_model_name(self._served_name):
            raise InvalidInput("model_id", f"is {model!r}; a template here is of the model served, {self._served_name}")

    def _state_as_lists(self, script: Script) -> dict[str, Any]:
        count = script.adapter.params.numel()
        if count > MAX_STATE_CELLS:
            raise InvalidInput(
                "get_state_dict",
                f"would send {count} numbers as JSON, at most {MAX_STATE_CELLS}; save a checkpoint and download it",
            )
        return {name: tensor.tolist() for name, tensor in self.get_state_dict().items()}

    # Files.

    def export(self, script: Script, *, with_optimizer: bool) -> dict[str, bytes]:
        """The weights, and beside them where the training stands; moments as the other dialect has them, if it can."""
        with self.bound(script):
            files = self._training_files(script.group, with_optimizer=with_optimizer)
        shares_moments = with_optimizer and note_steps(script.group.optimizer, script.adapter)
        return files | self.files_of(script.adapter, with_optimizer=shares_moments)

    def load_into(self, script: Script, files: Mapping[str, bytes], call: Call) -> bytes:
        """Load a checkpoint; where it does not fit, ``script`` is spoilt."""
        resumes = call.method == "resume_from_checkpoint" and not call.arguments.get("resume_only_model")
        group = script.group
        state = TrainerState.from_files(files) if TRAINER_FILE in files else TrainerState()
        with self.bound(script):
            self._take_weights(group, files, "the checkpoint")
            self._clear_gradients(group)
            group.clear_window()
            if resumes or (call.method == "load" and call.arguments.get("load_optimizer")):
                self._load_moments(script, files)
            if resumes and TRAINER_FILE in files:
                self._go_on(group, state, files)
            else:
                group.cur_step -= group.cur_step % group.gradient_accumulation_steps
        group.last = None
        return b"null" if call.method == "load" else body_of(state.progress())

    def _load_moments(self, script: Script, files: Mapping[str, bytes]) -> None:
        optimizer = script.group.require_optimizer()
        if not note_steps(optimizer, script.adapter):
            self._load_optimizer(script.group, files)
            return
        loaded = self.adapter_of(files, with_optimizer=True)
        script.adapter.exp_avg.copy_(loaded.exp_avg)
        script.adapter.exp_avg_sq.copy_(loaded.exp_avg_sq)
        set_steps(optimizer, loaded.step)
        if OPTIMIZER_SETTINGS_FILE in files:
            load_optimizer_settings(optimizer, files)

    def clear_window(self, script: Script) -> None:
        """Forget the gradients and the window that they were of: the next pass begins one."""
        group = script.group
        script.adapter.clear_gradients()
        group.clear_window()
        group.cur_step -= group.cur_step % group.gradient_accumulation_steps


def note_failure(script: Script) -> None:
    """What was called has failed: no later call is about the pass before it, which the metrics see all the same."""
    try:
        script.group.show_metrics()
    except InvalidInput:
        # Its keywords are not what a metric takes, which whoever called has been told.
        pass
    script.group.last = None


def loss_keywords(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a loss as its class takes them: what must be a tensor is one."""
    return {
        name: _tensor(name, value) if name in _TENSORS and value is not None else value
        for name, value in arguments.items()
    }


_TENSORS = frozenset(
    {"teacher_logits", "teacher_topk_logprobs", "teacher_topk_indices", "ref_chosen_logps", "ref_rejected_logps"}
)


def _tensor(name: str, value: Any) -> torch.Tensor:
    """Nested lists as a tensor; rows of unequal length are filled up with zeros."""
    try:
        if value and isinstance(value[0], list) and isinstance(value[0][0], list):
            rows = [torch.tensor(row) for row in value]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return torch.tensor(value)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise InvalidInput(name, "must be nested lists of numbers") from error


def body_of(result: object) -> bytes:
    """The JSON body of an answer; float32 in the shortest form that reads as the same float32."""
    try:
        return orjson.dumps({"result": result}, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # What orjson does not know, like numbers that are none.
        return json.dumps({"result": result}, default=str).encode()


def _attempt(call: Call, method: Callable[..., Any], *arguments: Any, changes: bool = True) -> Any:
    """Call a method with what a client has sent; what it cannot take is the client's to mend."""
    if "adapter_name" in call.arguments:
        raise InvalidInput("adapter_name", "is said by the path of the run, not among the arguments")
    try:
        return method(*arguments, **call.arguments)
    except InvalidInput:
        raise
    except _OF_THE_CLIENT as error:
        words = f"{call.method} cannot be done with these arguments: {error}"
        if not changes:
            raise InvalidInput(call.method, words) from error
        raise CallFailed(words) from error
