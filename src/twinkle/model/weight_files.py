"""The weights of a transformers model and of its PEFT adapters, from and to the directories that these tools read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch.distributed.fsdp import FSDPModule

from twinkle.checkpoint_engine.directory import verify_tensors, write_files
from twinkle.checkpoint_engine.peft_tensors import published_key
from twinkle.checkpoint_engine.sharded import fill
from twinkle.core.errors import InvalidInput
from twinkle.model.loading import stored_paths
from twinkle.module.adapter import AS_LOADED, StoredPaths

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAMES_OF_MODULES = ("target_modules", "target_parameters", "exclude_modules")
PATTERNS_OF_MODULES = ("rank_pattern", "alpha_pattern")
PEFT_CONTAINERS = ("lora_", "modules_to_save", "trainable_tokens")


def paths_of(model: torch.nn.Module, folder: str) -> StoredPaths:
    """What the modules of a model are called in the files of its adapters.

    By the names of the class that was published, also where the language model alone was loaded: other tools load that
    class, and would serve it bare, with a warning, for names that it has not.
    """
    paths = stored_paths(folder)
    holds_the_whole = any(name.startswith(paths.published) for name, _ in model.named_modules())
    return AS_LOADED if holds_the_whole else paths


def adapter_parameters(
    model: torch.nn.Module, adapter_name: str, paths: StoredPaths = AS_LOADED
) -> dict[str, torch.nn.Parameter]:
    """The parameters of one PEFT adapter, by the names they have in its file."""
    found: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        for index, (part, following) in enumerate(pairwise(parts)):
            if part.startswith(PEFT_CONTAINERS) and following == adapter_name:
                found[published_key(_stored_name(parts, index), paths)] = parameter
                break
    return found


def _stored_name(parts: list[str], container: int) -> str:
    before, after = parts[:container], parts[container + 2 :]
    if parts[container] == "modules_to_save":
        return ".".join([*before, *after])
    if parts[container] == "lora_magnitude_vector":
        after = []
    return ".".join([*before, parts[container], *after])


def save_adapter(folder: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write an adapter as PEFT does."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    write_files(
        folder,
        {
            ADAPTER_CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
            ADAPTER_WEIGHTS: safetensors.torch.save(tensors, metadata={"format": "pt"}),
        },
    )


def load_adapter(folder: Path, parameters: Mapping[str, torch.nn.Parameter], paths: StoredPaths = AS_LOADED) -> None:
    """Fill an adapter's parameters from its file, which may name them after the language model alone.

    Raises:
        InvalidInput: A tensor is missing, unknown or of another shape.
    """
    tensors = {published_key(name, paths): tensor for name, tensor in _read(folder / ADAPTER_WEIGHTS).items()}
    _fill(ADAPTER_WEIGHTS, tensors, parameters, optional=frozenset())


def renamed_settings(settings: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """An adapter's settings with other names of modules; the end of a path, or a word, stays what it is."""
    renamed = dict(settings)
    for name in NAMES_OF_MODULES:
        if isinstance(renamed.get(name), (list, tuple, set)):
            renamed[name] = type(renamed[name])(rename(module) for module in renamed[name])
    for name in PATTERNS_OF_MODULES:
        if isinstance(renamed.get(name), dict):
            renamed[name] = {rename(module): value for module, value in renamed[name].items()}
    return renamed


def save_model(folder: Path, state: Mapping[str, torch.Tensor], model: Any) -> None:
    """Write a whole model as transformers does, and read it back."""
    model.save_pretrained(folder, state_dict=dict(state))
    verify_tensors(folder, state)


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a whole model in its directory.

    Raises:
        InvalidInput: There is no model.
    """
    tensors = read_tensors_of(folder)
    if not tensors:
        raise InvalidInput("checkpoint", f"{folder} holds no model.safetensors")
    return tensors


def load_model(
    folder: Path, parameters: Mapping[str, torch.nn.Parameter], *, optional: frozenset[str], model: Any
) -> None:
    """Fill all parameters of ``model`` from its directory, where names in ``optional`` may be missing or too many.

    Raises:
        InvalidInput: There is no model, or a tensor is missing, unknown or of another shape.
    """
    tensors = stored_weights(folder)
    if parameters.keys() - tensors.keys() - optional:
        tensors = _converted(folder, model) or tensors
    _fill("model.safetensors", tensors, parameters, optional=optional)


def read_tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's directory by name; none where there is no model."""
    return {name: tensor for path in sorted(folder.glob("model*.safetensors")) for name, tensor in _read(path).items()}


def _converted(folder: Path, model: Any) -> dict[str, torch.Tensor] | None:
    """The tensors by the names that the model's class has for them, as of experts, which files hold one by one."""
    plain: Any = next(
        kind
        for kind in type(model).__mro__
        if issubclass(kind, transformers.PreTrainedModel) and not issubclass(kind, FSDPModule)
    )
    loaded, info = plain.from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        return None
    return dict(loaded.state_dict())


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InvalidInput(path.name, f"cannot be read from {path.parent}: {error}") from error


def _fill(
    file: str,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    optional: frozenset[str],
) -> None:
    missing = sorted(parameters.keys() - tensors.keys() - optional)
    unknown = sorted(tensors.keys() - parameters.keys() - optional)
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"holds the unknown tensor {unknown[0]}"
        raise InvalidInput(file, f"{problem}; it was saved from another model or adapter")
    for name, parameter in parameters.items():
        if name in tensors and tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)}, the parameter {tuple(parameter.shape)}"
            raise InvalidInput(file, f"{name} has shape {shapes}")
    for name, parameter in parameters.items():
        if name in tensors:
            fill(parameter, tensors[name])
