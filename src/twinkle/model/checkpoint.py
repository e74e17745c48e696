"""Saving and loading, the same for every kind of model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from twinkle.checkpoint_engine.directory import read_files, staged_directory, write_files
from twinkle.checkpoint_engine.training_state import (
    TrainerState,
    gradient_files,
    load_gradients,
    load_optimizer,
    load_rng,
    load_scheduler,
    optimizer_files,
    rng_files,
    scheduler_files,
)
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.file_names import SCHEDULER_FILE
from twinkle.data_format.answers import SavedCheckpoint
from twinkle.hub.model_path import resolve_model_id
from twinkle.hub.reference import names_repository
from twinkle.hub.tokenizer_files import tokenizer_files
from twinkle.infra.progress import track
from twinkle.infra.remote import remote_function
from twinkle.metric.loss_picture import draw_loss
from twinkle.metric.records import METRICS_FILE
from twinkle.model.optimizer_group import OptimizerGroup

DEFAULT_OUTPUT_DIR = "output"


class TrainingCheckpoints(ABC):
    """Checkpoints of one adapter, or of all parameters: directories that plain PEFT and transformers read.

    Every rank calls; the first one writes.
    """

    model_id: str

    @abstractmethod
    def group(self, adapter_name: str) -> OptimizerGroup:
        """The group of an adapter."""

    @abstractmethod
    def _write_weights(self, group: OptimizerGroup, folder: Path, *, is_writer: bool) -> None:
        """Write the weights and their config into a folder, verified."""

    @abstractmethod
    def _load_weights(self, group: OptimizerGroup, folder: Path) -> None:
        """Read them back into the model."""

    @abstractmethod
    def _mark_gradients(self, group: OptimizerGroup) -> None:
        """Take notice of gradients that were filled from a file."""

    @abstractmethod
    def _clear_gradients(self, group: OptimizerGroup) -> None:
        """Empty the gradients."""

    def _optimizer_files(self, group: OptimizerGroup) -> dict[str, bytes]:
        group.gather_window()
        files = optimizer_files(group.require_optimizer(), group.parameters)
        return files | gradient_files(group.parameters, num_open=group.num_open, num_tokens=group.num_tokens)

    def _load_optimizer(self, group: OptimizerGroup, files: Mapping[str, bytes]) -> None:
        load_optimizer(group.require_optimizer(), group.parameters, files)

    def _load_window(self, group: OptimizerGroup, files: Mapping[str, bytes]) -> tuple[int, int]:
        """The gradients of an open window; how many backward passes they are of, and their count."""
        return load_gradients(group.parameters, files)

    def _training_files(self, group: OptimizerGroup, *, with_optimizer: bool) -> dict[str, bytes]:
        """What a checkpoint holds beside the weights, but for what is of the process."""
        files = _state_of(group).to_files()
        if with_optimizer:
            files |= self._optimizer_files(group)
            if group.scheduler is not None:
                files |= scheduler_files(group.scheduler)
        return files

    def save(
        self,
        name: str | None = None,
        output_dir: str | Path | None = None,
        interval: int = 1,
        save_optimizer: bool = False,
        consumed_train_samples: int | None = None,
        *,
        adapter_name: str = "",
    ) -> SavedCheckpoint | None:
        """Write a checkpoint to ``output_dir/name``; its path, or None where ``interval`` does not divide ``cur_step``.

        Args:
            name: ``checkpoint-step-<cur_step>`` if omitted.
            output_dir: ``output`` if omitted.
            interval: Of backward passes.
            save_optimizer: Add what training needs to go on: optimizer, schedule, open gradients, random state.
            consumed_train_samples: Where the script's data stands; given back by ``resume_from_checkpoint``.
            adapter_name: Whose.
        """
        group = self.group(adapter_name)
        if interval < 1:
            raise InvalidInput("interval", f"is {interval}; send 1 or more")
        if group.cur_step % interval:
            return None
        if consumed_train_samples is not None:
            group.consumed_train_samples = consumed_train_samples
        target = Path(output_dir or DEFAULT_OUTPUT_DIR) / (name or f"checkpoint-step-{group.cur_step}")
        files = self._training_files(group, with_optimizer=save_optimizer)
        files |= tokenizer_files(self.model_id) | _record_files(group)
        if save_optimizer:
            files |= rng_files()
        if _is_first_rank():
            with track("save", unit="files") as progress, staged_directory(target) as folder:
                self._write_weights(group, folder, is_writer=True)
                progress.advance()
                for name_of_file, content in files.items():
                    write_files(folder, {name_of_file: content})
                    progress.advance()
        else:
            self._write_weights(group, target, is_writer=False)
        if distributed.is_initialized():
            distributed.barrier()
        return SavedCheckpoint(target)

    def load(
        self,
        name: str | Path,
        output_dir: str | Path | None = None,
        load_optimizer: bool = False,
        *,
        token: str | None = None,
        adapter_name: str = "",
    ) -> None:
        """Load the weights of a checkpoint, and if asked its optimizer.

        Args:
            name: A directory in ``output_dir``; without that a path, one of ``output``, or a repository of a hub.
            output_dir: Where it lies.
            load_optimizer: Whether its optimizer is loaded too.
            token: For the hub; default: as its own library finds one.
            adapter_name: Whose.

        Raises:
            InvalidInput: It is neither here nor on a hub, or it is of another model.
        """
        group = self.group(adapter_name)
        folder = find_checkpoint(name, output_dir, token=token)
        self._load_weights(group, folder)
        self._clear_gradients(group)
        group.clear_window()
        if load_optimizer:
            self._load_optimizer(group, read_files(folder))

    def resume_from_checkpoint(
        self, checkpoint_dir: str | Path, *, resume_only_model: bool = False, adapter_name: str = ""
    ) -> dict[str, int]:
        """Go on where a checkpoint was saved with its optimizer, on an adapter set up as it was then.

        Args:
            checkpoint_dir: The directory.
            resume_only_model: Load the weights alone, and begin a new training with them.
            adapter_name: Whose.

        Returns:
            ``cur_step``, ``consumed_train_samples`` and ``gradient_accumulation_steps`` of the checkpoint.
        """
        folder = find_checkpoint(checkpoint_dir, field="checkpoint_dir")
        files = read_files(folder)
        state = TrainerState.from_files(files)
        self.load(folder, adapter_name=adapter_name, load_optimizer=not resume_only_model)
        if not resume_only_model:
            group = self.group(adapter_name)
            self._go_on(group, state, files)
            load_rng(files)
            group.records.go_on_from(files.get(METRICS_FILE, b""))
        return state.progress()

    def _go_on(self, group: OptimizerGroup, state: TrainerState, files: Mapping[str, bytes]) -> None:
        """Stand where a checkpoint was saved, its weights and its optimizer being loaded already."""
        group.set_accumulation(state.gradient_accumulation_steps)
        group.cur_step, group.consumed_train_samples = state.cur_step, state.consumed_train_samples
        if group.scheduler is not None:
            load_scheduler(group.scheduler, files)
        elif SCHEDULER_FILE in files:
            raise InvalidInput(SCHEDULER_FILE, "is in the checkpoint; call set_lr_scheduler before resuming")
        group.num_open, group.num_tokens = self._load_window(group, files)
        group.keep_window_once()
        self._mark_gradients(group)

    @abstractmethod
    def get_state_dict(self, *, adapter_name: str = "") -> dict[str, torch.Tensor]:
        """The weights, by the names they have in a checkpoint."""

    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    @abstractmethod
    def get_peft_config_dict(self, *, adapter_name: str = "") -> dict[str, Any]:
        """The adapter's config as PEFT has it; empty where all parameters are trained."""


def _state_of(group: OptimizerGroup) -> TrainerState:
    return TrainerState(
        cur_step=group.cur_step,
        gradient_accumulation_steps=group.gradient_accumulation_steps,
        consumed_train_samples=group.consumed_train_samples,
    )


def _record_files(group: OptimizerGroup) -> dict[str, bytes]:
    """What the training has recorded so far, in lines and as pictures; nothing before its first step."""
    lines = {METRICS_FILE: group.records.to_file()} if group.records.lines else {}
    return {**lines, **draw_loss(group.records, group.name or "all parameters")}


def find_checkpoint(
    name: str | Path, output_dir: str | Path | None = None, *, token: str | None = None, field: str = "name"
) -> Path:
    """The folder of a checkpoint: in ``output_dir``, else a path, one of ``output``, or a repository of a hub.

    Raises:
        InvalidInput: It is nowhere; names the field.
    """
    candidates = [Path(output_dir) / name] if output_dir else [Path(name), Path(DEFAULT_OUTPUT_DIR) / name]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    missing = f"there is no checkpoint directory {' or '.join(dict.fromkeys(map(str, candidates)))}"
    if output_dir is not None or not names_repository(str(name)):
        raise InvalidInput(field, missing)
    try:
        return Path(resolve_model_id(str(name), token=token, field=field))
    except ConfigError as error:
        raise InvalidInput(field, f"{missing}, and the hubs have none: {error}") from error


def _is_first_rank() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0
