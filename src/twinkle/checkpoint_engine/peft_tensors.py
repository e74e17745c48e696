"""How PEFT names and shapes the tensors of an adapter.

A Linear's pair is ``<module>.lora_A.weight`` [rank, in] and ``.lora_B.weight`` [out, rank]. The pairs of fused experts
(PEFT's ``ParamWrapper``, release 0.18 and later) lie in two matrices that only look like those of one Linear:

* ``lora_A`` is [experts * rank, in], expert after expert;
* ``lora_B`` is [out, rank * experts], read as [out, rank, experts]: the experts vary fastest.

A module with several weights is wrapped once for each, so a weight's name is not in its keys: of n trained weights of a
module the first has the keys ``<module>.base_layer.lora_A`` (n - 1 times ``base_layer``), the last ``<module>.lora_A``.

Shapes: E experts, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from twinkle.checkpoint_engine.tensor_file import copy_checked
from twinkle.core.errors import InvalidInput
from twinkle.module.adapter import AdapterLayout, LoraPair, LoraShape, StoredPaths
from twinkle.module.targets import Target

KEY_PREFIX = "base_model.model."
WRAPPED = ".base_layer"
SUFFIX_A, SUFFIX_B = ".lora_A.weight", ".lora_B.weight"


def stored_tensors(layout: AdapterLayout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a flat buffer as PEFT stores them: views of it, but for those of experts, which may be copies."""
    tensors: dict[str, torch.Tensor] = {}
    views = layout.views(buffer)
    names = _names(layout)
    for shape in layout.shapes:
        a, b = _as_peft(shape, views[shape.path])
        tensors[names[shape.path] + SUFFIX_A] = a.flatten(0, -2)
        tensors[names[shape.path] + SUFFIX_B] = b if b.dim() == 2 else b.permute(1, 2, 0).flatten(1)
    return tensors


def _as_peft(shape: LoraShape, pair: LoraPair) -> LoraPair:
    """The pair as PEFT sees it, in the same memory: the update of a transposed weight is ``(B A)^T = A^T B^T``."""
    return LoraPair(pair.b.mT, pair.a.mT) if shape.is_swapped else pair


def fill_buffer(file: str, source: Mapping[str, torch.Tensor], layout: AdapterLayout, buffer: torch.Tensor) -> None:
    """Copy stored tensors into a flat buffer, or raise ``InvalidInput`` naming the one that does not fit."""
    # On the host, whatever the device, which gets it in one copy.
    here = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
    stored = stored_tensors(layout, here)
    copy_checked(file, source, stored)
    views = layout.views(here)
    names = _names(layout)
    for shape in layout.shapes:
        if shape.num_experts is not None:
            a, b = _as_peft(shape, views[shape.path])
            b_ORE = stored[names[shape.path] + SUFFIX_B].unflatten(1, (shape.rank, shape.num_experts))
            b.copy_(b_ORE.permute(2, 0, 1))
            a.copy_(stored[names[shape.path] + SUFFIX_A].view_as(a))
    if here is not buffer:
        buffer.copy_(here)


def trained_paths(
    file: str,
    tensors: Mapping[str, torch.Tensor],
    targets: Sequence[Target],
    wrapped_parameters: Iterable[str],
    paths: StoredPaths,
) -> list[str]:
    """The paths of the targets that the stored tensors train, in the order of ``targets``.

    Args:
        file: What to call the file in errors.
        tensors: By their keys.
        targets: Of the base model.
        wrapped_parameters: PEFT's ``target_parameters``: which weights of a module of experts are meant.
        paths: What modules are called in files.

    Raises:
        InvalidInput: A tensor belongs to none of them.
    """
    stored = {
        key.removeprefix(KEY_PREFIX).removesuffix(suffix)
        for key in tensors
        for suffix in (SUFFIX_A, SUFFIX_B)
        if key.endswith(suffix)
    }
    wanted = tuple(wrapped_parameters)
    by_module: dict[str, list[Target]] = {}
    for target in targets:
        if target.num_experts is None or is_named(paths.stored(target.path), wanted):
            by_module.setdefault(target.module_path, []).append(target)
    found: list[str] = []
    for module, module_targets in by_module.items():
        names = [paths.stored(module) + WRAPPED * depth for depth in reversed(range(len(module_targets)))]
        for target, name in zip(module_targets, names, strict=True):
            if name in stored:
                found.append(target.path)
                stored.remove(name)
    if stored:
        raise InvalidInput(
            file,
            f"holds the unknown tensor {KEY_PREFIX}{min(stored)}.lora_A; it was made for another model or another "
            "set of trained layers",
        )
    return found


def is_named(path: str, names: Sequence[str]) -> bool:
    """Whether one of ``names`` is this path or its end."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def published_key(key: str, paths: StoredPaths) -> str:
    """The key of a tensor that may have been stored from the language model alone, as it is stored here."""
    return KEY_PREFIX + paths.stored(key.removeprefix(KEY_PREFIX)) if key.startswith(KEY_PREFIX) else key


def _names(layout: AdapterLayout) -> dict[str, str]:
    names: dict[str, str] = {}
    depths: dict[str, int] = {}
    for shape in reversed(layout.shapes):
        if shape.num_experts is None:
            names[shape.path] = KEY_PREFIX + layout.paths.stored(shape.path)
            continue
        module = shape.path.rpartition(".")[0]
        names[shape.path] = KEY_PREFIX + layout.paths.stored(module) + WRAPPED * depths.get(module, 0)
        depths[module] = depths.get(module, 0) + 1
    return {shape.path: names[shape.path] for shape in layout.shapes}
