"""The calls of a training script on a model, whatever the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from twinkle.data_format.answers import MetricResults, ModelOutput
from twinkle.infra.remote import remote_class, remote_function
from twinkle.model.remote_outputs import joined_outputs

Rows = Sequence[Mapping[str, Any]] | Mapping[str, Any]


@remote_class()
class TwinkleModel:
    """Base of every model, a script's own included: derive from it and define the calls that your loop makes.

    None is demanded beforehand; one that is called and not defined says so. ``forward_backward`` and
    ``clip_grad_and_step`` are made of their pieces, so a model that has the pieces has them.
    """

    # A step, piece by piece and in one call.

    @remote_function(dispatch="slice_dp", collect=joined_outputs)
    def forward(self, *, inputs: Rows, adapter_name: str = "", **loss_kwargs: Any) -> ModelOutput:
        """Run rows through the model in training mode."""
        raise self._undefined("forward")

    @remote_function(dispatch="slice_dp", collect=joined_outputs)
    def forward_only(self, *, inputs: Rows, adapter_name: str = "", **loss_kwargs: Any) -> ModelOutput:
        """Run rows in evaluation mode, without gradients."""
        raise self._undefined("forward_only")

    @remote_function(dispatch="all", collect="mean")
    def calculate_loss(self, *, adapter_name: str = "", **loss_kwargs: Any) -> float:
        """The loss of the last pass."""
        raise self._undefined("calculate_loss")

    @remote_function(dispatch="all", collect="first")
    def backward(self, *, adapter_name: str = "") -> None:
        """Add the gradient of the last loss."""
        raise self._undefined("backward")

    @remote_function(dispatch="slice_dp", collect=joined_outputs)
    def forward_backward(self, *, inputs: Rows, adapter_name: str = "", **loss_kwargs: Any) -> ModelOutput:
        """Forward, loss and backward."""
        names = {"adapter_name": adapter_name} if adapter_name else {}
        output = self.forward(inputs=inputs, **names, **loss_kwargs)
        loss = self.calculate_loss(**names, **loss_kwargs)
        self.backward(**names)
        return ModelOutput({**output, "loss": loss})

    @remote_function(dispatch="all", collect="first")
    def clip_grad_norm(self, max_grad_norm: float = 1.0, norm_type: float = 2, *, adapter_name: str = "") -> Any:
        """Bound the gradient; its norm before."""
        raise self._undefined("clip_grad_norm")

    @remote_function(dispatch="all", collect="first")
    def step(self, optim_params: Mapping[str, Any] | None = None, *, adapter_name: str = "") -> None:
        """Step the optimizer."""
        raise self._undefined("step")

    @remote_function(dispatch="all", collect="first")
    def zero_grad(self, *, adapter_name: str = "") -> None:
        """Clear the gradients."""
        raise self._undefined("zero_grad")

    @remote_function(dispatch="all", collect="first")
    def lr_step(self, *, adapter_name: str = "") -> None:
        """Move the learning rate's schedule on."""
        raise self._undefined("lr_step")

    @remote_function(dispatch="all", collect="first")
    def clip_grad_and_step(self, max_grad_norm: float = 1.0, norm_type: float = 2, *, adapter_name: str = "") -> Any:
        """Clip, step, clear, and move the schedule on; the norm before clipping."""
        names: Any = {"adapter_name": adapter_name} if adapter_name else {}
        norm = self.clip_grad_norm(max_grad_norm, norm_type, **names)
        self.step(**names)
        self.zero_grad(**names)
        self.lr_step(**names)
        return norm

    # What a script sets.

    @remote_function(dispatch="all", collect="first")
    def set_loss(self, loss_cls: Any, *, adapter_name: str = "", **settings: Any) -> None:
        """Set the loss."""
        raise self._undefined("set_loss")

    @remote_function(dispatch="all", collect="first")
    def set_optimizer(self, optimizer_cls: Any, *, adapter_name: str = "", **settings: Any) -> None:
        """Set the optimizer."""
        raise self._undefined("set_optimizer")

    @remote_function(dispatch="all", collect="first")
    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str = "", **settings: Any) -> None:
        """Set the schedule of the learning rate."""
        raise self._undefined("set_lr_scheduler")

    @remote_function(dispatch="all", collect="first")
    def set_template(self, template_cls: Any, *, adapter_name: str = "", **settings: Any) -> None:
        """Set what turns conversations into rows."""
        raise self._undefined("set_template")

    @remote_function(dispatch="all", collect="first")
    def set_processor(self, processor_cls: Any, *, adapter_name: str = "", **settings: Any) -> None:
        """Set what makes batches of rows."""
        raise self._undefined("set_processor")

    @remote_function(dispatch="all", collect="first")
    def add_metric(
        self, metric_cls: Any, is_training: bool | None = None, *, adapter_name: str = "", **settings: Any
    ) -> None:
        """Add a metric."""
        raise self._undefined("add_metric")

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def apply_patch(self, patch_cls: Any, *, adapter_name: str = "", **settings: Any) -> Any:
        """Change the model by a patch."""
        raise self._undefined("apply_patch")

    @remote_function(dispatch="all", collect="first")
    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1, is_trainable: bool = True
    ) -> None:
        """Add an adapter."""
        raise self._undefined("add_adapter_to_model")

    # What a script reads.

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def calculate_metric(self, is_training: bool = True, *, adapter_name: str = "") -> MetricResults:
        """The metrics since the last call."""
        raise self._undefined("calculate_metric")

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def get_train_configs(self, *, adapter_name: str = "") -> str:
        """What is set, for people to read."""
        raise self._undefined("get_train_configs")

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, torch.Tensor]:
        """The weights by name."""
        raise self._undefined("get_state_dict")

    # Files.

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def save(
        self,
        name: str | None = None,
        output_dir: str | Path | None = None,
        interval: int = 1,
        save_optimizer: bool = False,
        consumed_train_samples: int | None = None,
        *,
        adapter_name: str = "",
    ) -> str | None:
        """Write a checkpoint; its path."""
        raise self._undefined("save")

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def load(
        self,
        name: str | Path,
        output_dir: str | Path | None = None,
        load_optimizer: bool = False,
        *,
        token: str | None = None,
        adapter_name: str = "",
    ) -> None:
        """Load the weights of a checkpoint."""
        raise self._undefined("load")

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def resume_from_checkpoint(
        self, checkpoint_dir: str | Path, *, resume_only_model: bool = False, adapter_name: str = ""
    ) -> Mapping[str, int]:
        """Go on where a checkpoint was saved."""
        raise self._undefined("resume_from_checkpoint")

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def upload_to_hub(
        self, checkpoint_dir: str, hub_model_id: str, hub_token: str | None = None, async_upload: bool = True
    ) -> Any:
        """Send a checkpoint to a hub."""
        raise self._undefined("upload_to_hub")

    def _undefined(self, call: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not define {call}, which was called; define it there")
