"""What a rank has of an adapter while a job of it runs: from flat buffers to Megatron's layers, and gradients back.

Every rank keeps every adapter whole, in the buffers that the fused engine keeps it in, and so steps, stores and
restores it as that one does; layers are given their parts for one job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import peft
import torch

from twinkle.core.errors import ConfigError
from twinkle.model.megatron.build import EXPERT_INDEX, LAYER_INDEX
from twinkle.model.megatron.families.blocks import PUBLISHED_LAYER
from twinkle.model.megatron.layout import Layout
from twinkle.model.megatron.lora.adapter import MegatronAdapter, MegatronAdapters
from twinkle.model.megatron.lora.layers import Pair
from twinkle.model.megatron.lora.sites import Part, Site, picked_rows
from twinkle.model.megatron.weights.rules import Columns, Named, PartedRows, Vocabulary, WeightRule
from twinkle.module.adapter import LoraAdapter, LoraPair, StoredPaths
from twinkle.module.expert_forms import GATED, ExpertForm
from twinkle.module.targets import Target

HEAD = "output_layer"
EXPERT_WEIGHTS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""What transformers calls the weights that all experts of a layer share, by Megatron's name of an expert's own."""
PLAIN_EXPERTS = ExpertForm(first=GATED, is_transposed=False, has_bias=False, scales_input=False, peft_swaps=False)


def head_site(target: Target, *, vocab_size: int) -> Site:
    """The output projection, whose weight may be the embedding's."""
    rule = Vocabulary(f"{HEAD}.weight", (f"{target.path}.weight",), vocab_size)
    part = Part(target.path, target.in_features, target.out_features)
    return Site(HEAD, Named(rule, rule.published), (part,), splits_inputs=False)


def expert_site(name: str, targets: Mapping[str, Target], paths: StoredPaths) -> Site:
    """One of the two layers of one expert.

    Args:
        name: In the whole model.
        targets: By their paths in the loaded model.
        paths: What modules are called in files.

    Raises:
        ConfigError: Experts are not such a target there.
    """
    layer, expert = LAYER_INDEX.fullmatch(name), EXPERT_INDEX.fullmatch(name)
    assert layer is not None and expert is not None, name
    weight = EXPERT_WEIGHTS[name.rpartition(".")[2]]
    path = f"{PUBLISHED_LAYER.format(layer=layer[2])}mlp.experts.{weight}"
    target = targets.get(path)
    form = None if target is None else target.form
    if target is None or form is None or form != PLAIN_EXPERTS:
        raise ConfigError(
            f"TWINKLE_ENGINE: megatron has no adapters for experts in the form of {path}; use transformers for this"
            " model"
        )
    stored = paths.stored(path)
    published = (f"{stored}[{expert[2]}]",)
    splits_inputs = weight == "down_proj"
    rule: WeightRule = Columns(f"{name}.weight", published)
    if not splits_inputs:
        half = target.out_features // 2
        rule = PartedRows(f"{name}.weight", published, ((half, half),))
    part = Part(stored, target.in_features, target.out_features)
    return Site(name, Named(rule, published), (part,), splits_inputs, int(expert[2]))


@dataclass(frozen=True)
class _Place:
    """Of one part which of its inputs this rank's ``A`` takes, or which outputs its ``B`` makes; None: all.

    Args:
        path: Of the part, in an adapter.
        expert: Whose pair of all experts' it is, if it is one's.
    """

    path: str
    columns: slice | None
    rows: torch.Tensor | None
    expert: int | None

    def of(self, views: Mapping[str, LoraPair]) -> LoraPair:
        """The whole pair."""
        return views[self.path] if self.expert is None else views[self.path].expert(self.expert)


class Borrowed:
    """The parts of one adapter in this rank's layers, and what gathers in their gradients.

    Args:
        as_layers_have_it: For the layers.
        places: This rank's own parameters of each part, and where they lie in the whole.
    """

    def __init__(self, as_layers_have_it: MegatronAdapter, places: Sequence[tuple[Pair, _Place]]) -> None:
        self.as_layers_have_it = as_layers_have_it
        self._places = places

    def add_gradients(self, views: Mapping[str, LoraPair]) -> None:
        """Add what this rank has found to a whole gradient's views; the sum over all ranks is all there is.

        Of what several ranks have, each finds the gradient from its own tokens.
        """
        for pair, place in self._places:
            whole = place.of(views)
            if pair.a.grad is not None:
                (whole.a if place.columns is None else whole.a[:, place.columns]).add_(pair.a.grad)
            if pair.b.grad is None:
                continue
            if place.rows is None:
                whole.b.add_(pair.b.grad)
            else:
                # The rows that fill up a vocabulary name a row twice, with a gradient of zero.
                whole.b.index_add_(0, place.rows, pair.b.grad)


class Shares:
    """Lends adapters to a model's layers.

    Args:
        adapters: Where they can be; the output projection and the experts among them.
        layout: The ranks, of which tensor ranks have different tokens between layers.
        paths: What modules are called in files, which is what sites call them.
    """

    def __init__(self, adapters: MegatronAdapters, layout: Layout, paths: StoredPaths) -> None:
        self._layout = layout
        self._paths = paths
        self._sites = [adapters.sites[name] for name in adapters.own_names]
        self._places = {site.name: tuple(self._places_of(site)) for site in self._sites}
        # The layers look at the dropout alone, which an adapter that is served has not.
        self._config = peft.LoraConfig(lora_dropout=0.0)

    def borrow(self, adapter: LoraAdapter) -> Borrowed:
        """The parts of an adapter that this rank's layers need, as parameters of their own."""
        trained: dict[str, list[Pair | None]] = {}
        found: list[tuple[Pair, _Place]] = []
        for site in self._sites:
            pairs: list[Pair | None] = []
            for place in self._places[site.name]:
                pair: Pair | None = None
                if place.path in adapter.views:
                    pair = _pair(place.of(adapter.views), place, adapter.scales[place.path])
                    found.append((pair, place))
                pairs.append(pair)
            if any(pair is not None for pair in pairs):
                trained[site.name] = pairs
        return Borrowed(MegatronAdapter(self._config, {}, {}, trained), found)

    def _places_of(self, site: Site) -> Iterator[_Place]:
        groups = self._layout.groups
        group = groups.tp if site.expert is None else groups.expt_tp
        rows = () if site.splits_inputs else picked_rows(site.named, site.parts, group.rank(), group.size())[0]
        for index, part in enumerate(site.parts):
            columns, own = None, None
            if site.splits_inputs:
                each = part.num_inputs // group.size()
                columns = slice(group.rank() * each, (group.rank() + 1) * each)
            else:
                own = rows[index].to(self._layout.device)
            yield _Place(self._paths.within(part.path), columns, own, site.expert)


def _pair(whole: LoraPair, place: _Place, scale: float) -> Pair:
    a = whole.a if place.columns is None else whole.a[:, place.columns]
    b = whole.b if place.rows is None else whole.b[place.rows]
    return Pair(_parameter(a), _parameter(b), scale)


def _parameter(values: torch.Tensor) -> torch.nn.Parameter:
    # A copy: what is lent may be used again in a backward pass, and takes gradients of its own.
    return torch.nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))
