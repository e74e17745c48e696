"""What a rank has of an adapter while a job of it runs: from flat buffers to Megatron's layers, and gradients back.

Every rank keeps every adapter whole, in the buffers that the fused engine keeps it in, and so steps, stores and
restores it as that one does; layers are given their parts for one job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import peft
import torch

from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.lora.adapter import MegatronAdapter, MegatronAdapters
from twinkle.model.megatron.lora.layers import Pair
from twinkle.model.megatron.lora.sites import Part, Site, picked_rows
from twinkle.model.megatron.weights.rules import Named, Vocabulary
from twinkle.module.adapter import LoraAdapter, LoraPair, StoredPaths
from twinkle.module.targets import Target

HEAD = "output_layer"


def head_site(target: Target, *, vocab_size: int) -> Site:
    """The output projection, whose weight may be the embedding's."""
    rule = Vocabulary(f"{HEAD}.weight", (f"{target.path}.weight",), vocab_size)
    part = Part(target.path, target.in_features, target.out_features)
    return Site(HEAD, Named(rule, rule.published), (part,), splits_inputs=False)


@dataclass(frozen=True)
class _Place:
    """Of one part which of its inputs this rank's ``A`` takes, or which outputs its ``B`` makes; None: all."""

    columns: slice | None
    rows: torch.Tensor | None


class Borrowed:
    """The parts of one adapter in this rank's layers, and what gathers in their gradients.

    Args:
        as_layers_have_it: For the layers.
        places: By the path of a part, its own parameters and where they lie in the whole.
    """

    def __init__(self, as_layers_have_it: MegatronAdapter, places: Mapping[str, tuple[Pair, _Place]]) -> None:
        self.as_layers_have_it = as_layers_have_it
        self._places = places

    def add_gradients(self, views: Mapping[str, LoraPair], *, is_first_tensor_rank: bool) -> None:
        """Add what this rank has found, of what several have found the first one's, to a whole gradient's views."""
        for path, (pair, place) in self._places.items():
            whole = views[path]
            if pair.a.grad is not None and (place.columns is not None or is_first_tensor_rank):
                (whole.a if place.columns is None else whole.a[:, place.columns]).add_(pair.a.grad)
            if pair.b.grad is None:
                continue
            if place.rows is not None:
                # The rows that fill up a vocabulary name a row twice, with a gradient of zero.
                whole.b.index_add_(0, place.rows, pair.b.grad)
            elif is_first_tensor_rank:
                whole.b.add_(pair.b.grad)


class Shares:
    """Lends adapters to a model's layers.

    Args:
        adapters: Where they can be; the output projection among them.
        layout: The ranks.
        paths: What modules are called in files, which is what sites call them.
    """

    def __init__(self, adapters: MegatronAdapters, layout: Layout, paths: StoredPaths) -> None:
        self._paths = paths
        self._sites = [adapters.sites[name] for name in adapters.own_names]
        group = layout.groups.tp
        self._places = {
            (site.name, index): _place(site, index, group.rank(), group.size(), layout.device)
            for site in self._sites
            for index in range(len(site.parts))
        }
        # The layers look at the dropout alone, which an adapter that is served has not.
        self._config = peft.LoraConfig(lora_dropout=0.0)

    def borrow(self, adapter: LoraAdapter) -> Borrowed:
        """The parts of an adapter that this rank's layers need, as parameters of their own."""
        pairs: dict[str, list[Pair | None]] = {}
        found: dict[str, tuple[Pair, _Place]] = {}
        for site in self._sites:
            for index, part in enumerate(site.parts):
                path = self._paths.within(part.path)
                pair: Pair | None = None
                if path in adapter.views:
                    place = self._places[site.name, index]
                    pair = _pair(adapter.views[path], place, adapter.scales[path])
                    found[path] = (pair, place)
                pairs.setdefault(site.name, []).append(pair)
        trained = {name: each for name, each in pairs.items() if any(pair is not None for pair in each)}
        return Borrowed(MegatronAdapter(self._config, {}, {}, trained), found)

    def paths(self) -> Iterator[str]:
        """What this rank's layers can be lent."""
        for site in self._sites:
            for part in site.parts:
                yield self._paths.within(part.path)


def _place(site: Site, index: int, rank: int, size: int, device: torch.device) -> _Place:
    part = site.parts[index]
    if site.splits_inputs:
        each = part.num_inputs // size
        return _Place(slice(rank * each, (rank + 1) * each), None)
    return _Place(None, picked_rows(site.named, site.parts, rank, size)[0][index].to(device))


def _pair(whole: LoraPair, place: _Place, scale: float) -> Pair:
    a = whole.a if place.columns is None else whole.a[:, place.columns]
    b = whole.b if place.rows is None else whole.b[place.rows]
    return Pair(_parameter(a), _parameter(b), scale)


def _parameter(values: torch.Tensor) -> torch.nn.Parameter:
    # A copy: what is lent may be used again in a backward pass, and takes gradients of its own.
    return torch.nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
