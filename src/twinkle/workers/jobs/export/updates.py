"""What an adapter adds to each tensor of its base model's files.

Shapes: E experts, O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from twinkle.checkpoint_engine.peft import CONFIG_FILE, WEIGHTS_FILE
from twinkle.checkpoint_engine.peft_settings import config_of, read_settings
from twinkle.checkpoint_engine.peft_tensors import fill_buffer, trained_paths
from twinkle.checkpoint_engine.tensor_file import read_tensors
from twinkle.core.errors import ConfigError
from twinkle.module.adapter import AS_LOADED, AdapterLayout, LoraPair, LoraShape
from twinkle.module.lora import shapes_of
from twinkle.module.targets import Target, beside_experts
from twinkle.workers.jobs.export.skeleton import Skeleton

_NUMBER = re.compile(r"(?<=\.)0(?=\.)")
_AS_STORED = AS_LOADED


@dataclass(frozen=True)
class TrainedWeight:
    """One weight that an adapter changes."""

    target: Target
    shape: LoraShape
    pair: LoraPair

    @property
    def name(self) -> str:
        """Of the parameter, as the class has it."""
        return self.target.path if self.target.num_experts is not None else f"{self.target.path}.weight"

    def update(self, expert: int | None = None) -> torch.Tensor:
        """What is added to the parameter, or to one expert's part of it [1, ...], in float32.

        Experts are computed one by one: each has the same bits whether it is asked for alone or not.
        """
        if self.target.num_experts is None:
            return self.shape.scale * (self.pair.b @ self.pair.a)
        numbers = range(self.target.num_experts) if expert is None else (expert,)
        update = torch.stack([self.shape.scale * (self.pair.b[number] @ self.pair.a[number]) for number in numbers])
        assert self.target.form is not None
        return update.mT.contiguous() if self.target.form.is_transposed else update


@dataclass(frozen=True)
class WeightPart:
    """Which part of which weight a tensor of the files is."""

    weight: TrainedWeight
    expert: int | None
    piece: str
    """What the tensor is called when this expert's part alone is turned into what the files have."""


def read_adapter(skeleton: Skeleton, files: Mapping[str, bytes]) -> list[TrainedWeight]:
    """An adapter's weights in PEFT's files, which name the modules of the published class.

    Raises:
        InvalidInput: They do not fit the base model.
    """
    settings = read_settings(files[CONFIG_FILE])
    tensors = read_tensors(WEIGHTS_FILE, files[WEIGHTS_FILE])
    layout_paths = trained_paths(WEIGHTS_FILE, tensors, skeleton.targets, settings["target_parameters"], _AS_STORED)
    config = config_of(settings, layout_paths, skeleton.targets)
    layout = AdapterLayout(
        tuple(shapes_of(skeleton.targets, config)), beside_experts=beside_experts(skeleton.targets), paths=_AS_STORED
    )
    buffer = torch.zeros(layout.numel)
    fill_buffer(WEIGHTS_FILE, tensors, layout, buffer)
    pairs = layout.views(buffer)
    targets = {target.path: target for target in skeleton.targets}
    return [TrainedWeight(targets[shape.path], shape, pairs[shape.path]) for shape in layout.shapes]


class Updates:
    """What is to be added to the tensors of a base model's files, by their names there."""

    def __init__(self, skeleton: Skeleton, weights: list[TrainedWeight], stored_names: frozenset[str]) -> None:
        """Find the place of every weight.

        Raises:
            ConfigError: One has no place in the files.
        """
        self._skeleton = skeleton
        self.untied_head: str | None = None
        """What the output head is called in files that will hold one of its own for the first time."""
        self.places: dict[str, WeightPart] = {}
        self.stored_names: dict[str, str] = {}
        """By a trained parameter's name that of one of its tensors in the files."""
        self._weights = {weight.name: weight for weight in weights}
        for weight in weights:
            places = self._places_of(weight)
            if weight.name == skeleton.head and skeleton.is_tied:
                [self.untied_head] = places
            elif not places.keys() <= stored_names:
                missing = min(places.keys() - stored_names)
                raise ConfigError(
                    f"{skeleton.architecture}: the base model's files hold no {missing}, which the adapter changes;"
                    " this arrangement of its weights is not known: export the adapter alone, as peft"
                )
            self.places |= places
            self.stored_names[weight.name] = next(iter(places))
        # Both projections of an expert lie beside each other in the files.
        self._pieces = lru_cache(maxsize=4)(self._pieces_of)

    def embedding_file_name(self) -> str:
        """What the input embedding is called in the files."""
        [name] = self._skeleton.stored(self._skeleton.embedding, torch.empty(1, 1, device="meta"))
        return name

    def of(self, name: str) -> torch.Tensor | None:
        """What is added to a tensor of the files, in float32; None where nothing is."""
        place = self.places.get(name)
        if place is None:
            return None
        return self._pieces(place.weight.name, place.expert)[place.piece]

    def _places_of(self, weight: TrainedWeight) -> dict[str, WeightPart]:
        empty = torch.empty(weight.target.module.get_parameter(weight.name.rpartition(".")[2]).shape, device="meta")
        names = list(self._skeleton.stored(weight.name, empty))
        num_experts = weight.target.num_experts
        if num_experts is None or len(names) == 1:
            return {name: WeightPart(weight, None, name) for name in names}
        pieces = list(self._skeleton.stored(weight.name, empty[:1]))
        places = {}
        for expert in range(num_experts):
            for piece in pieces:
                [name] = {named for named in _numbered(piece, expert) if named in names}
                places[name] = WeightPart(weight, expert, piece)
        if places.keys() != set(names):
            raise ConfigError(f"{weight.name}: its experts lie in the files in a way that is not known")
        return places

    def _pieces_of(self, name: str, expert: int | None) -> dict[str, torch.Tensor]:
        return self._skeleton.stored(name, self._weights[name].update(expert))


def _numbered(piece: str, expert: int) -> list[str]:
    """The name of the first expert's tensor with another number, for each number in it."""
    return [piece[: at.start()] + str(expert) + piece[at.end() :] for at in _NUMBER.finditer(piece)]
