"""What training needs besides the weights to go on bit by bit, as files that hold data only, never pickled objects.

trainer_state.json      checkpoint_version, cur_step, gradient_accumulation_steps, consumed_train_samples
optimizer.safetensors   <state>.<parameter>, such as exp_avg.base_model...; the step in the metadata
optimizer.json          the settings of the optimizer's parameter groups
scheduler.json          the numbers of the learning rate's schedule
gradients.safetensors   the gradients of an accumulation window that is open; its counts in the metadata
rng_state.safetensors   torch's random state
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import safetensors.torch
import torch
from torch import distributed
from torch.optim.lr_scheduler import LRScheduler

from twinkle.checkpoint_engine.sharded import fill, like, whole
from twinkle.checkpoint_engine.tensor_file import read_metadata, read_tensors
from twinkle.core.errors import InvalidInput
from twinkle.core.file_names import (
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    OPTIMIZER_SETTINGS_FILE,
    SCHEDULER_FILE,
    TRAINER_FILE,
)

RNG_FILE = "rng_state.safetensors"
CHECKPOINT_VERSION = 1
STEP = "step"
WINDOW = "window"
FORMAT = ("format", "pt")

Parameters = Mapping[str, torch.nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where a script stood."""

    checkpoint_version: int = CHECKPOINT_VERSION
    cur_step: int = 0
    gradient_accumulation_steps: int = 1
    consumed_train_samples: int = 0

    def to_files(self) -> dict[str, bytes]:
        """The state as its file."""
        return {TRAINER_FILE: (json.dumps(asdict(self), indent=2) + "\n").encode()}

    def progress(self) -> dict[str, int]:
        """What a script that resumes is told."""
        return {
            "cur_step": self.cur_step,
            "consumed_train_samples": self.consumed_train_samples,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> TrainerState:
        """The state that ``to_files`` wrote.

        Raises:
            InvalidInput: The file is missing, damaged or of another version.
        """
        values = _read_json(files, TRAINER_FILE)
        known = {field.name for field in fields(cls)}
        try:
            state = cls(**{name: int(value) for name, value in values.items() if name in known})
        except (TypeError, ValueError) as error:
            raise InvalidInput(TRAINER_FILE, "its values must be integers") from error
        if state.checkpoint_version != CHECKPOINT_VERSION:
            raise InvalidInput(
                TRAINER_FILE, f"has version {state.checkpoint_version}, this release reads {CHECKPOINT_VERSION}"
            )
        return state


def optimizer_files(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, bytes]:
    """State and settings of an optimizer. A step that all parameters share stands in the metadata."""
    tensors: dict[str, torch.Tensor] = {}
    steps: dict[str, torch.Tensor] = {}
    num_with_state = sum(bool(optimizer.state.get(parameter)) for parameter in parameters.values())
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            place = steps if key == STEP else tensors
            place[f"{key}.{name}"] = whole(torch.as_tensor(value))
    shared = {float(step) for step in steps.values()}
    is_shared = len(shared) == 1 and len(steps) == num_with_state
    if not is_shared:
        tensors.update(steps)
    return state_files(optimizer, tensors, step=int(shared.pop()) if is_shared else None)


def state_files(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], *, step: int | None
) -> dict[str, bytes]:
    """The files of an optimizer's state that is whole already; ``step`` where all parameters share it."""
    groups = [
        {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        for group in optimizer.param_groups
    ]
    settings = {"optimizer": type(optimizer).__name__, "groups": groups}
    return {
        OPTIMIZER_FILE: _write(tensors, metadata=(STEP, "" if step is None else str(step))),
        OPTIMIZER_SETTINGS_FILE: _to_json(settings),
    }


def read_state(files: Mapping[str, bytes]) -> tuple[dict[str, torch.Tensor], int | None]:
    """The tensors of an optimizer's state, whole, and the step where all parameters share it."""
    content = _file(files, OPTIMIZER_FILE)
    step = read_metadata(OPTIMIZER_FILE, content).get(STEP, "")
    return read_tensors(OPTIMIZER_FILE, content), int(step) if step else None


def load_optimizer(optimizer: torch.optim.Optimizer, parameters: Parameters, files: Mapping[str, bytes]) -> None:
    """Put an optimizer back where ``optimizer_files`` took its state; its settings too, where they are in the files.

    State that is there already is filled in place.
    """
    tensors, step = read_state(files)
    for name, parameter in parameters.items():
        own = {key.removesuffix(f".{name}"): tensors.pop(key) for key in list(tensors) if key.endswith(f".{name}")}
        if step is not None and STEP not in own and own:
            own[STEP] = torch.tensor(float(step))
        for key, value in own.items():
            if value.dim() and value.shape != parameter.shape:
                raise InvalidInput(
                    OPTIMIZER_FILE,
                    f"{key}.{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}",
                )
            present = optimizer.state[parameter].get(key)
            if isinstance(present, torch.Tensor):
                fill(present, value)
            else:
                optimizer.state[parameter][key] = like(value, parameter) if value.dim() else value
    if tensors:
        raise InvalidInput(OPTIMIZER_FILE, f"holds the unknown tensor {min(tensors)}; it was made for other parameters")
    if OPTIMIZER_SETTINGS_FILE in files:
        load_optimizer_settings(optimizer, files)


def load_optimizer_settings(optimizer: torch.optim.Optimizer, files: Mapping[str, bytes]) -> None:
    """The settings of the optimizer's groups alone."""
    settings = _read_json(files, OPTIMIZER_SETTINGS_FILE)
    groups = settings.get("groups", [])
    if settings.get("optimizer") != type(optimizer).__name__ or len(groups) != len(optimizer.param_groups):
        raise InvalidInput(
            OPTIMIZER_SETTINGS_FILE,
            f"is of {len(groups)} groups of {settings.get('optimizer')}, the optimizer has "
            f"{len(optimizer.param_groups)} of {type(optimizer).__name__}; set the same one",
        )
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for key, value in stored.items():
            group[key] = tuple(value) if isinstance(value, list) else value


def scheduler_files(scheduler: LRScheduler) -> dict[str, bytes]:
    """The numbers of a schedule; functions come from setting the same schedule again."""
    state = {key: value for key, value in scheduler.state_dict().items() if _is_plain(value)}
    return {SCHEDULER_FILE: _to_json({"scheduler": type(scheduler).__name__, "state": state})}


def load_scheduler(scheduler: LRScheduler, files: Mapping[str, bytes]) -> None:
    """Go on where ``scheduler_files`` was taken."""
    stored = _read_json(files, SCHEDULER_FILE)
    if stored.get("scheduler") != type(scheduler).__name__:
        raise InvalidInput(SCHEDULER_FILE, f"is of {stored.get('scheduler')}, not of {type(scheduler).__name__}")
    scheduler.load_state_dict({**scheduler.state_dict(), **stored["state"]})


def gradient_files(parameters: Parameters, *, num_open: int, num_tokens: int) -> dict[str, bytes]:
    """The gradients of an open window; no file when none is open."""
    if num_open == 0:
        return {}
    tensors = {name: whole(parameter.grad) for name, parameter in parameters.items() if parameter.grad is not None}
    return window_files(tensors, num_open=num_open, num_tokens=num_tokens)


def window_files(tensors: Mapping[str, torch.Tensor], *, num_open: int, num_tokens: int) -> dict[str, bytes]:
    """The file of gradients that are whole already."""
    return {GRADIENTS_FILE: _write(tensors, metadata=(WINDOW, json.dumps([num_open, num_tokens])))}


def read_window(files: Mapping[str, bytes]) -> tuple[dict[str, torch.Tensor], int, int]:
    """The gradients of an open window, how many backward passes they are of, and their count; none without a file."""
    if GRADIENTS_FILE not in files:
        return {}, 0, 0
    content = files[GRADIENTS_FILE]
    num_open, num_tokens = json.loads(read_metadata(GRADIENTS_FILE, content)[WINDOW])
    return read_tensors(GRADIENTS_FILE, content), int(num_open), int(num_tokens)


def load_gradients(parameters: Parameters, files: Mapping[str, bytes]) -> tuple[int, int]:
    """Fill the gradients; how many backward passes they are of, and their count of tokens. (0, 0) without a file."""
    tensors, num_open, num_tokens = read_window(files)
    for name, gradient in tensors.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != gradient.shape:
            raise InvalidInput(
                GRADIENTS_FILE, f"holds {name} of shape {tuple(gradient.shape)}, no such parameter is here"
            )
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        fill(parameter.grad, gradient)
    return num_open, num_tokens


def rng_files() -> dict[str, bytes]:
    """Torch's random state of each rank, on the CPU and on its accelerator; all ranks must call."""
    own = {"cpu": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        own[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    ranks: list[dict[str, torch.Tensor]] = [own]
    if distributed.is_initialized():
        ranks = [own] * distributed.get_world_size()
        distributed.all_gather_object(ranks, own)
    states = {f"{rank}.{device}": state for rank, found in enumerate(ranks) for device, state in found.items()}
    return {RNG_FILE: _write(states, metadata=FORMAT)}


def load_rng(files: Mapping[str, bytes]) -> None:
    """Put this rank's random state back; what the checkpoint has no state for goes on as it is."""
    states = read_tensors(RNG_FILE, _file(files, RNG_FILE))
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    if f"{rank}.cpu" in states:
        torch.set_rng_state(states[f"{rank}.cpu"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and f"{rank}.{accelerator.type}" in states:
        torch.get_device_module(accelerator).set_rng_state(states[f"{rank}.{accelerator.type}"])


def _write(tensors: Mapping[str, torch.Tensor], *, metadata: tuple[str, str]) -> bytes:
    # Copies: tensors that are views of one buffer cannot be written as they are.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, metadata=dict([metadata]))


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _to_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise InvalidInput(name, "is missing from the checkpoint; it was saved without save_optimizer")
    return files[name]


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(_file(files, name))
    except ValueError as error:
        raise InvalidInput(name, "is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidInput(name, "is not a JSON object")
    return value
