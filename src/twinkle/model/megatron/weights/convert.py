"""Filling the parts that a rank holds from published tensors, and making published tensors of all ranks' parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import distributed

from twinkle.core.errors import InvalidInput
from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.weights.rules import Named, WeightTable

EXPERTS = ".experts."
FUSED_EXPERTS = ".experts.gate_up_proj"
ENTRY = re.compile(r"(.+)\[(\d+)\]")
"""One entry of a tensor that all experts of a layer share."""
Lookup = Callable[[str], torch.Tensor]
Change = Callable[[str, torch.Tensor], torch.Tensor]
NamedTensors = Iterator[tuple[str, torch.Tensor]]


class PublishedFolder:
    """The safetensors files of a folder, one tensor at a time, which is mapped: read is what is taken of it.

    Raises:
        InvalidInput: There are none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise InvalidInput("checkpoint", f"{folder} holds no model.safetensors")

    @property
    def fuses_experts(self) -> bool:
        """Whether all experts of a layer are one tensor."""
        return any(name.endswith(FUSED_EXPERTS) for name in self._files)

    def others(self, names: Container[str]) -> dict[str, torch.Tensor]:
        """The tensors of all other names: of a tower beside the language model."""
        return {name: file.get_tensor(name) for name, file in self._files.items() if name not in names}

    def __call__(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            InvalidInput: The folder lacks it.
        """
        found = ENTRY.fullmatch(name)
        whole = name if found is None else found[1]
        if whole not in self._files:
            raise InvalidInput("checkpoint", f"{self._folder} lacks {whole}; it was saved from another model")
        file = self._files[whole]
        tensor: torch.Tensor = file.get_tensor(name) if found is None else file.get_slice(whole)[int(found[2])]
        return tensor


@torch.no_grad()
def fill(values: Mapping[str, torch.Tensor], table: WeightTable, lookup: Lookup, layout: Layout) -> None:
    """Fill what this rank holds, by Megatron's whole names, from published tensors.

    Raises:
        InvalidInput: One is missing, or of another shape.
    """
    for name, value in values.items():
        named = table.find(name)
        group = tensor_group(name, layout)
        local = named.rule.local([_looked_up(lookup, each) for each in named.published], group.rank(), group.size())
        if local.shape != value.shape:
            raise InvalidInput(
                "checkpoint",
                f"{', '.join(named.published)} make {tuple(local.shape)}, {name} is {tuple(value.shape)}",
            )
        value.copy_(local)


def _looked_up(lookup: Lookup, name: str) -> torch.Tensor:
    found = ENTRY.fullmatch(name)
    # A folder reads one entry alone.
    return lookup(name) if found is None or isinstance(lookup, PublishedFolder) else lookup(found[1])[int(found[2])]


@torch.no_grad()
def published(
    values: Mapping[str, torch.Tensor], table: WeightTable, layout: Layout, change: Change | None = None
) -> NamedTensors:
    """The published tensors of what all ranks hold, on the CPU of rank 0; on other ranks none. All ranks must iterate.

    Of what several hold, the first of them sends. Tensors that experts share come last, whole. ``change`` makes of a
    rank's part, by its name, what is published in its place.
    """
    shared: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in _published(values, table, layout, change or _as_it_is):
        entry = ENTRY.fullmatch(name)
        if entry is None:
            yield name, tensor
        else:
            shared.setdefault(entry[1], {})[int(entry[2])] = tensor
    for name in list(shared):
        entries = shared.pop(name)
        yield name, torch.stack([entries[number] for number in sorted(entries)])


def _published(values: Mapping[str, torch.Tensor], table: WeightTable, layout: Layout, change: Change) -> NamedTensors:
    rank = distributed.get_rank()
    for name, (owner, shape, dtype) in _owners(values).items():
        named = table.find(name)
        if named.is_copy:
            continue
        group = tensor_group(name, layout)
        tensors: tuple[torch.Tensor, ...] = ()
        if owner in distributed.get_process_group_ranks(group):
            tensors = named.rule.whole(_shards(change(name, values[name]), named, group))
        elif rank == 0:
            shards = [torch.empty(shape, dtype=dtype, device="meta")] * (group.size() if named.rule.is_split else 1)
            tensors = tuple(torch.empty_like(each, device=layout.device) for each in named.rule.whole(shards))
        if owner != 0 and rank in (0, owner):
            for tensor in tensors:
                _move(tensor, owner)
        if rank == 0:
            for published_name, tensor in zip(named.published, tensors, strict=True):
                # A copy: parts of one tensor cannot be written as they are, and weights go on changing.
                yield published_name, tensor.cpu().clone(memory_format=torch.contiguous_format)


def _as_it_is(name: str, value: torch.Tensor) -> torch.Tensor:
    return value


def tensor_group(name: str, layout: Layout) -> Any:
    """The ranks over which a weight is split: experts have a group of their own."""
    return layout.groups.expt_tp if EXPERTS in name else layout.groups.tp


def _owners(values: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    """Of every name that a rank holds: the first rank that does, and shape and dtype there."""
    own = {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
    ranks: list[dict[str, Any]] = [own] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    found: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    for rank, names in enumerate(ranks):
        for name, (shape, dtype) in names.items():
            found.setdefault(name, (rank, shape, dtype))
    return found


def _shards(value: torch.Tensor, named: Named, group: Any) -> list[torch.Tensor]:
    value = value.detach().contiguous()
    if not named.rule.is_split or group.size() == 1:
        return [value]
    shards = [torch.empty_like(value) for _ in range(group.size())]
    distributed.all_gather(shards, value, group=group)
    return shards


def _move(tensor: torch.Tensor, owner: int) -> None:
    """From its owner to rank 0."""
    if distributed.get_rank() == owner:
        distributed.send(tensor.contiguous(), 0)
    else:
        distributed.recv(tensor, owner)
