"""How one of Megatron's weights is made of published ones, and which part of it each tensor-parallel rank holds.

Shapes: a rule works on the leading dimension (or the second, for columns), so that biases and whatever lies beside a
weight (an optimizer's moments, the rows of a LoRA's B) go the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from twinkle.core.errors import ConfigError
from twinkle.module.adapter import AS_LOADED, StoredPaths

Tensors = Sequence[torch.Tensor]
PLACES = re.compile(r"\{(layer|expert)\}")


class WeightRule(Protocol):
    """One weight, or one of each layer: ``{layer}`` in its names is the layer's number in the whole model, from 0.

    ``{expert}`` is an expert's number in its layer; a published name that ends with it in brackets is one entry of a
    tensor that all experts share.
    """

    @property
    def megatron(self) -> str:
        """What Megatron calls it."""
        ...

    @property
    def published(self) -> tuple[str, ...]:
        """What Hugging Face's checkpoints call what it is made of."""
        ...

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The part of a rank, of ``size``, from the published tensors."""
        ...

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """The published tensors from the parts of all ranks."""
        ...

    @property
    def is_split(self) -> bool:
        """Whether the ranks hold different parts."""
        ...


@dataclass(frozen=True)
class Same:
    """Every rank holds the published tensor."""

    megatron: str
    published: tuple[str, ...]
    is_split: bool = False

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The tensor."""
        return tensors[0]

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """The first rank's."""
        return (shards[0],)


@dataclass(frozen=True)
class Columns:
    """Each rank holds some columns (of a layer whose input is split)."""

    megatron: str
    published: tuple[str, ...]
    is_split: bool = True

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The rank's columns."""
        return tensors[0].chunk(size, dim=1)[rank]

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """All columns."""
        return (torch.cat(list(shards), dim=1),)


@dataclass(frozen=True)
class Rows:
    """Each rank holds some rows of each published tensor, one tensor's after the other's (gate and up)."""

    megatron: str
    published: tuple[str, ...]
    is_split: bool = True

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The rank's rows of each."""
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """All rows of each."""
        parts = [shard.chunk(len(self.published)) for shard in shards]
        return tuple(torch.cat([part[index] for part in parts]) for index in range(len(self.published)))


@dataclass(frozen=True)
class Vocabulary:
    """Each rank holds the rows of some tokens; rows of zeros fill up what does not divide.

    ``is_copy``: Of a weight that another rule writes too, as a head tied to the embedding.
    """

    megatron: str
    published: tuple[str, ...]
    num_tokens: int
    is_copy: bool = False
    is_split: bool = True

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The rank's rows."""
        [tensor] = tensors
        each = -(-self.num_tokens // size)
        rows = tensor[rank * each : (rank + 1) * each]
        return torch.cat([rows, rows.new_zeros(each - len(rows), *rows.shape[1:])])

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """The rows of all tokens there are."""
        return (torch.cat(list(shards))[: self.num_tokens],)


@dataclass(frozen=True)
class GroupedHeads:
    """Queries, keys and values, interleaved by groups: of each its queries' heads, its key head, its value head.

    Args:
        megatron: The fused weight.
        published: The three.
        rows: How many rows of each of the three belong to one group.
    """

    megatron: str
    published: tuple[str, ...]
    rows: tuple[int, ...]
    is_split: bool = True

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The rank's groups."""
        groups = [
            tensor.unflatten(0, (-1, rows)).chunk(size)[rank] for tensor, rows in zip(tensors, self.rows, strict=True)
        ]
        return torch.cat(groups, dim=1).flatten(0, 1)

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """The three."""
        groups = torch.cat([shard.unflatten(0, (-1, sum(self.rows))) for shard in shards])
        return tuple(part.flatten(0, 1) for part in groups.split(list(self.rows), dim=1))


@dataclass(frozen=True)
class GatedHeads:
    """The same with a gate for each query: published beside it, head by head; here after the queries of a group.

    Args:
        megatron: The fused weight.
        published: Queries with gates, keys, values.
        size: Of a head.
        rows: How many rows of queries, keys and values belong to one group.
    """

    megatron: str
    published: tuple[str, ...]
    size: int
    rows: tuple[int, ...]
    is_split: bool = True

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The rank's groups."""
        queries, *others = tensors
        heads = queries.unflatten(0, (-1, self.rows[0] // self.size, 2, self.size)).chunk(size)[rank]
        groups = [heads.transpose(1, 2).flatten(1, 3)]
        groups += [
            tensor.unflatten(0, (-1, rows)).chunk(size)[rank]
            for tensor, rows in zip(others, self.rows[1:], strict=True)
        ]
        return torch.cat(groups, dim=1).flatten(0, 1)

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """The three."""
        rows = [2 * self.rows[0], *self.rows[1:]]
        groups = torch.cat([shard.unflatten(0, (-1, sum(rows))) for shard in shards])
        queries, *others = groups.split(rows, dim=1)
        heads = queries.unflatten(1, (2, -1, self.size)).transpose(1, 2)
        return (heads.flatten(0, 3), *(part.flatten(0, 1) for part in others))


@dataclass(frozen=True)
class PartedRows:
    """Each rank holds some rows of every part of each published tensor.

    Args:
        megatron: The fused weight.
        published: What it is made of.
        parts: How many rows the parts of each have.
    """

    megatron: str
    published: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    is_split: bool = True

    def local(self, tensors: Tensors, rank: int, size: int) -> torch.Tensor:
        """The rank's rows of each part."""
        parts = (part for tensor, sizes in zip(tensors, self.parts, strict=True) for part in tensor.split(list(sizes)))
        return torch.cat([part.chunk(size)[rank] for part in parts])

    def whole(self, shards: Tensors) -> tuple[torch.Tensor, ...]:
        """All rows of each."""
        sizes = [rows // len(shards) for parts in self.parts for rows in parts]
        pieces = [shard.split(sizes) for shard in shards]
        parts = iter([torch.cat(each) for each in zip(*pieces, strict=True)])
        return tuple(torch.cat([next(parts) for _ in sizes_of]) for sizes_of in self.parts)


@dataclass(frozen=True)
class Named:
    """A rule for one weight: its layer and its expert are put in."""

    rule: WeightRule
    published: tuple[str, ...]

    @property
    def is_copy(self) -> bool:
        """Whether another weight of the model is published under the same name."""
        return isinstance(self.rule, Vocabulary) and self.rule.is_copy


class WeightTable:
    """Finds the rule of a weight by Megatron's name of it, with the layer's number in the whole model.

    ``paths`` says what modules are called in files, where more is published than the language model.
    """

    def __init__(self, rules: Iterable[WeightRule], paths: StoredPaths = AS_LOADED) -> None:
        self.rules = tuple(rules)
        self._paths = paths
        self._patterns = [(_pattern(rule.megatron), rule) for rule in self.rules]

    def find(self, name: str) -> Named:
        """The rule.

        Raises:
            ConfigError: No rule names it: the family's table does not fit its layers.
        """
        for pattern, rule in self._patterns:
            found = pattern.fullmatch(name)
            if found is not None:
                published = (_filled(each, found.groupdict()) for each in rule.published)
                return Named(rule, tuple(map(self._paths.stored, published)))
        raise ConfigError(f"model_id: no rule says what {name} is published as; this layer is not converted")


def _pattern(name: str) -> re.Pattern[str]:
    parts = PLACES.split(name)
    return re.compile(
        "".join(f"(?P<{part}>\\d+)" if index % 2 else re.escape(part) for index, part in enumerate(parts))
    )


def _filled(name: str, numbers: Mapping[str, str]) -> str:
    for place, number in numbers.items():
        name = name.replace(f"{{{place}}}", number)
    return name
