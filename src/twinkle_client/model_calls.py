"""The calls of a model at a server, each as a future."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from twinkle.data_format.answers import Answer, MetricResults, ModelOutput
from twinkle_client import answers
from twinkle_client.answers import GradNorm, Loss, Rows, SaveResponse, Text
from twinkle_client.arguments import component_name, config_text
from twinkle_client.errors import InvalidInput
from twinkle_client.futures import CallFuture, HandOver

T = TypeVar("T")

Inputs = Sequence[Mapping[str, Any]] | Mapping[str, Any]


class TrainedAdapter:
    """Which adapter an object trains: the one it added last."""

    def __init__(self) -> None:
        self.name: str | None = None


class ModelCalls:
    """The calls of a model, each as a future: handed over and done in their order, waited for when you like.

    ``model.submit.forward_backward(inputs=rows)`` takes what ``model.forward_backward(inputs=rows)`` takes, returns at
    once and gives a :class:`~twinkle_client.futures.CallFuture` of what that returns. Further arguments of a call go to
    the method at the server as they are.
    """

    def __init__(self, path: str, model_id: str, adapter: TrainedAdapter, hand_over: HandOver) -> None:
        """Made by a model; ``path`` is where its calls go, ``hand_over`` how."""
        self._path = path
        self._model_id = model_id
        self._adapter = adapter
        self._hand_over = hand_over

    # Adapters.

    def add_adapter_to_model(
        self,
        /,
        adapter_name: str,
        config: object = None,
        gradient_accumulation_steps: int | None = None,
        *,
        save_dir: str | None = None,
        **settings: Any,
    ) -> CallFuture[Answer]:
        """Add an adapter, which all later calls of this object are about.

        Args:
            adapter_name: Yours to choose; unique in the session.
            config: A ``peft.LoraConfig``, or its fields as a mapping (``{"r": 8, "lora_alpha": 32}``); None: all of the
                model's weights are trained, where the server has a mesh for that.
            gradient_accumulation_steps: How many passes make a step.
            save_dir: For servers that let their clients choose a folder of theirs.
            settings: For the server.
        """
        arguments = {
            "adapter_name": adapter_name,
            "config": None if config is None else config_text(config),
            **_given(gradient_accumulation_steps=gradient_accumulation_steps, save_dir=save_dir),
            **settings,
        }
        self._adapter.name = adapter_name
        return self._hand_over(f"{self._path}/add_adapter_to_model", arguments, _added)

    def remove_adapter(self, /, adapter_name: str | None = None, **options: Any) -> CallFuture[None]:
        """End an adapter behind its earlier calls: its place is free, its checkpoints stay, its name may be used again.

        Doing it again is no error. Servers of upstream have no such call; there an adapter ends with its session.

        Args:
            adapter_name: Default: the one that this object is about, which then is about none.
            options: For the server.
        """
        name = adapter_name or self._require_name()
        if name == self._adapter.name:
            self._adapter.name = None
        return self._hand_over(f"{self._path}/remove_adapter", {**options, "adapter_name": name}, answers.nothing)

    # A step, piece by piece and in one call.

    def forward(self, /, inputs: Inputs, **options: Any) -> CallFuture[ModelOutput | Rows]:
        """Run rows or conversations through the model in training mode."""
        return self._call("forward", answers.forwarded, {"inputs": _rows(inputs)}, options)

    def forward_only(
        self, /, inputs: Inputs, *, disable_lora: bool | None = None, **options: Any
    ) -> CallFuture[ModelOutput | Rows]:
        """Run them in evaluation mode, without gradients; with ``disable_lora`` through the base model."""
        arguments = {"inputs": _rows(inputs), **_given(disable_lora=disable_lora)}
        return self._call("forward_only", answers.forwarded, arguments, options)

    def calculate_loss(self, /, **loss_arguments: Any) -> CallFuture[Loss]:
        """The loss of the last pass."""
        return self._call("calculate_loss", answers.loss, {}, loss_arguments)

    def backward(self, /, **options: Any) -> CallFuture[None]:
        """Add the gradient of the last loss."""
        return self._call("backward", answers.nothing, {}, options)

    def forward_backward(self, /, inputs: Inputs, **loss_arguments: Any) -> CallFuture[ModelOutput | Rows]:
        """Forward, loss and backward; ``advantages``, ``old_logps``, ``ref_outputs``, ... are the loss's."""
        return self._call("forward_backward", answers.forwarded, {"inputs": _rows(inputs)}, loss_arguments)

    def clip_grad_norm(
        self, /, max_grad_norm: float = 1.0, norm_type: float = 2, **options: Any
    ) -> CallFuture[GradNorm | Text]:
        """Bound the gradient; its norm before."""
        arguments = {"max_grad_norm": max_grad_norm, "norm_type": norm_type}
        return self._call("clip_grad_norm", answers.grad_norm, arguments, options)

    def step(self, /, optim_params: Mapping[str, Any] | None = None, **options: Any) -> CallFuture[None]:
        """Step the optimizer."""
        return self._call("step", answers.nothing, _given(optim_params=optim_params), options)

    def zero_grad(self, /, **options: Any) -> CallFuture[None]:
        """Clear the gradients."""
        return self._call("zero_grad", answers.nothing, {}, options)

    def lr_step(self, /, **options: Any) -> CallFuture[None]:
        """Move the learning rate's schedule on."""
        return self._call("lr_step", answers.nothing, {}, options)

    def clip_grad_and_step(
        self, /, max_grad_norm: float = 1.0, norm_type: float = 2, **options: Any
    ) -> CallFuture[None]:
        """Clip, step, clear, and move the schedule on."""
        arguments = {"max_grad_norm": max_grad_norm, "norm_type": norm_type}
        return self._call("clip_grad_and_step", answers.nothing, arguments, options)

    # What a script sets: the server's classes, by their names.

    def set_loss(self, /, loss_cls: Any, **settings: Any) -> CallFuture[None]:
        """Set the loss, for example ``"GRPOLoss"``."""
        return self._set("set_loss", "loss_cls", loss_cls, settings)

    def set_optimizer(self, /, optimizer_cls: Any = "AdamW", **settings: Any) -> CallFuture[None]:
        """Set the optimizer."""
        return self._set("set_optimizer", "optimizer_cls", optimizer_cls, settings)

    def set_lr_scheduler(self, /, scheduler_cls: Any, **settings: Any) -> CallFuture[None]:
        """Set the schedule of the learning rate."""
        return self._set("set_lr_scheduler", "scheduler_cls", scheduler_cls, settings)

    def set_template(self, /, template_cls: Any, **settings: Any) -> CallFuture[None]:
        """Set what turns conversations into rows; of this model unless a ``model_id`` is given."""
        return self._set("set_template", "template_cls", template_cls, {"model_id": self._model_id, **settings})

    def set_processor(self, /, processor_cls: Any, **settings: Any) -> CallFuture[None]:
        """Set what makes batches of rows."""
        return self._set("set_processor", "processor_cls", processor_cls, settings)

    def add_metric(self, /, metric_cls: Any, is_training: bool | None = None, **settings: Any) -> CallFuture[None]:
        """Add a metric, of training passes, of others, or of both."""
        return self._set("add_metric", "metric_cls", metric_cls, {"is_training": is_training, **settings})

    def apply_patch(self, /, patch_cls: Any, **settings: Any) -> CallFuture[None]:
        """Change the model by one of the server's patches."""
        return self._set("apply_patch", "patch_cls", patch_cls, settings)

    # What a script reads.

    def calculate_metric(self, /, is_training: bool = True, **options: Any) -> CallFuture[MetricResults]:
        """The metrics since the last call."""
        return self._call("calculate_metric", answers.metrics, {"is_training": is_training}, options)

    def get_train_configs(self, /, **options: Any) -> CallFuture[Text]:
        """What is set, for people to read."""
        return self._call("get_train_configs", answers.text, {}, options)

    def get_state_dict(self, /, **options: Any) -> CallFuture[Answer]:
        """The adapter's weights by name, as lists."""
        return self._call("get_state_dict", answers.mapping, {}, options)

    # Checkpoints.

    def save(
        self,
        /,
        name: str | None = None,
        *,
        save_optimizer: bool | None = None,
        is_sampler: bool | None = None,
        consumed_train_samples: int | None = None,
        **options: Any,
    ) -> CallFuture[SaveResponse]:
        """Save a checkpoint at the server; its path, which is text.

        Args:
            name: Of the checkpoint; the server chooses one if omitted.
            save_optimizer: So that training can go on from it.
            is_sampler: Only for sampling, which is smaller.
            consumed_train_samples: Noted with it, for ``resume_from_checkpoint``.
            options: For the server, as ``ttl_s``.
        """
        given = _given(
            name=name,
            save_optimizer=save_optimizer,
            is_sampler=is_sampler,
            consumed_train_samples=consumed_train_samples,
        )
        return self._call("save", answers.saved, given, options)

    def load(self, /, name: str, load_optimizer: bool | None = None, **options: Any) -> CallFuture[None]:
        """Load the weights of a checkpoint, by its path."""
        arguments = {"name": str(name), **_given(load_optimizer=load_optimizer)}
        return self._call("load", answers.nothing, arguments, options)

    def resume_from_checkpoint(
        self, /, name: str, *, resume_only_model: bool = False, **options: Any
    ) -> CallFuture[Answer]:
        """Go on where a checkpoint was saved: ``cur_step``, ``consumed_train_samples`` and what else it knows."""
        arguments = {"name": str(name), "resume_only_model": resume_only_model}
        return self._call("resume_from_checkpoint", answers.mapping, arguments, options)

    def _require_name(self) -> str:
        if not self._adapter.name:
            raise InvalidInput("adapter_name", "no adapter was added with this object; call add_adapter_to_model first")
        return self._adapter.name

    def _set(self, method: str, field: str, component: Any, settings: Mapping[str, Any]) -> CallFuture[None]:
        return self._call(method, answers.nothing, {field: component_name(field, component)}, settings)

    def _call(
        self,
        method: str,
        read: Callable[[Any], T],
        arguments: Mapping[str, object],
        options: Mapping[str, object],
    ) -> CallFuture[T]:
        name = options.get("adapter_name") or self._require_name()
        return self._hand_over(f"{self._path}/{method}", {**arguments, **options, "adapter_name": name}, read)


def _added(answer: Any) -> Answer:
    added = answers.mapping(answer)
    for words in added.get("warnings") or ():
        warnings.warn(str(words), stacklevel=2)
    return added


def _rows(inputs: Inputs) -> list[Mapping[str, Any]]:
    return [inputs] if isinstance(inputs, Mapping) else list(inputs)


def _given(**arguments: object) -> dict[str, object]:
    """Those that say something: a server has defaults of its own."""
    return {name: value for name, value in arguments.items() if value is not None}
