"""The layout of a set of ranks: which axes of parallelism there are, and where each rank stands on them.

Pure arithmetic on numbers of ranks, without torch; ``process_group`` turns a layout into torch's own objects.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from twinkle.core.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""Axes a mesh may have, the outermost first: neighbours on the last one have neighbouring ranks."""
MODEL_PARALLEL = ("tp_size", "pp_size", "cp_size", "ep_size", "etp_size", "vpp_size")
"""Sizes that Megatron's models have."""
DATA_AXES = ("dp", "fsdp")
"""Ranks that differ on these get different data."""

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class DeviceMesh:
    """Ranks in a grid.

    ``ulysses_size`` and ``ep_size`` are no axes of the grid: such groups are made of ranks of the data axes, those of
    experts also of ranks that share tensors or sequences. Any layout can be described; those that a kind of model has
    not are refused where it is made (``require_data_axes``).

    Args:
        mesh: The rank at each place, each rank once.
        mesh_dim_names: The axis that each dimension of ``mesh`` stands for.
        device_type: ``cuda``, ``npu``, ``cpu``...; ``None`` takes what the machine has.
        ulysses_size: Ranks that share each sequence, head by head.
        ep_size: Ranks that share the experts of a layer.
        etp_size: Ranks that share each expert.
        ep_fsdp_size: Ranks over which the experts' weights are sharded.
        vpp_size: Stages of the pipeline on each rank.
        sequence_parallel: Whether activations between tensor-parallel layers are split along the sequence.

    Raises:
        ConfigError: The grid and its names do not fit together.
    """

    mesh: np.ndarray
    mesh_dim_names: tuple[str, ...]
    device_type: str | None = None
    ulysses_size: int | None = None
    ep_size: int | None = None
    etp_size: int = 1
    ep_fsdp_size: int | None = None
    vpp_size: int | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        mesh, names = np.asarray(self.mesh), tuple(self.mesh_dim_names)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "mesh_dim_names", names)
        if mesh.ndim != len(names):
            raise ConfigError(f"mesh_dim_names: {len(names)} names for {mesh.ndim} dimensions of the mesh")
        unknown = sorted(set(names) - set(AXES))
        if unknown or len(set(names)) < len(names):
            raise ConfigError(f"mesh_dim_names: {names}; each must be one of {', '.join(AXES)} and come once")
        if mesh.size == 0 or sorted(mesh.ravel().tolist()) != list(range(mesh.size)):
            raise ConfigError(
                f"mesh: must hold each of the ranks 0 to {max(mesh.size - 1, 0)} once, got {mesh.tolist()}"
            )
        ranks = self.size("dp") * self.size("fsdp")
        if self.ulysses_size is not None and (self.ulysses_size < 1 or ranks % self.ulysses_size):
            raise ConfigError(
                f"ulysses_size: {self.ulysses_size} must divide dp_size * fsdp_size = {ranks}: its groups are made of"
                " these ranks"
            )
        of_stage = self.world_size // self.size("pp")
        if self.ep_size is not None and (self.ep_size < 1 or of_stage % (self.ep_size * self.etp_size)):
            each = f" times etp_size {self.etp_size}" if self.etp_size > 1 else ""
            raise ConfigError(
                f"ep_size: {self.ep_size}{each} must divide the {of_stage} ranks that hold the same layers: its groups"
                " are made of these ranks"
            )
        if self.ep_fsdp_size is not None and self.ep_fsdp_size * (self.ep_size or 1) != ranks:
            raise ConfigError(
                f"ep_fsdp_size: is {self.ep_fsdp_size}, but {ranks} ranks hold each expert"
                f" {ranks // (self.ep_size or 1)} times with"
                f" ep_size {self.ep_size or 1}; set it to that, or leave it out"
            )

    @classmethod
    def from_sizes(
        cls,
        *,
        world_size: int = 1,
        dp_size: int = 1,
        fsdp_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        ulysses_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        etp_size: int = 1,
        ep_fsdp_size: int | None = None,
        vpp_size: int | None = None,
        device_type: str | None = None,
        sequence_parallel: bool = False,
    ) -> Self:
        """A mesh of consecutive ranks. Without ``world_size`` it is as large as the sizes say.

        Raises:
            ConfigError: A size is not positive, or the sizes do not multiply to ``world_size``.
        """
        given = {"pp": pp_size, "dp": dp_size, "fsdp": fsdp_size, "cp": cp_size, "tp": tp_size}
        sizes = {axis: size for axis, size in given.items() if size is not None}
        for axis, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{axis}_size: is {size}, must be at least 1")
        product = prod(sizes.values())
        if world_size not in (1, product):
            text = " * ".join(f"{axis}_size {size}" for axis, size in sizes.items())
            raise ConfigError(f"world_size: is {world_size}, but {text} = {product}; make them equal")
        return cls(
            mesh=np.arange(product).reshape(tuple(sizes.values())),
            mesh_dim_names=tuple(sizes),
            device_type=device_type,
            ulysses_size=ulysses_size,
            ep_size=ep_size,
            etp_size=etp_size,
            ep_fsdp_size=ep_fsdp_size,
            vpp_size=vpp_size,
            sequence_parallel=sequence_parallel,
        )

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in self.mesh_dim_names)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return int(self.mesh.size)

    def size(self, axis: str) -> int:
        """How many ranks lie along an axis; 1 for one the mesh does not have."""
        if axis not in AXES:
            raise ConfigError(f"axis: {axis!r} is unknown; the axes are {', '.join(AXES)}")
        return int(self.mesh.shape[self.mesh_dim_names.index(axis)]) if axis in self.mesh_dim_names else 1

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Where a rank (of this process, if omitted) stands on each axis of the mesh."""
        rank = current_rank() if rank is None else rank
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank: {rank} is not in this mesh of {self.world_size} ranks ({self})")
        place = np.argwhere(self.mesh == rank)[0].tolist()
        return dict(zip(self.mesh_dim_names, place, strict=True))

    def ranks_along(self, axis: str, rank: int | None = None) -> list[int]:
        """The ranks that differ from this one on ``axis`` alone, itself among them."""
        place = self.coordinates(rank)
        if self.size(axis) == 1:
            return [int(self.mesh[tuple(place.values())])]
        index = tuple(slice(None) if name == axis else at for name, at in place.items())
        return [int(other) for other in self.mesh[index]]

    @property
    def data_world_size(self) -> int:
        """Into how many parts a batch is cut. Ranks that share their sequences get the same part."""
        return self.size("dp") * self.size("fsdp") // (self.ulysses_size or 1)

    def data_part(self, rank: int | None = None) -> int:
        """Which part of a batch a rank gets."""
        place = self.coordinates(rank)
        return (place.get("dp", 0) * self.size("fsdp") + place.get("fsdp", 0)) // (self.ulysses_size or 1)

    @property
    def data_rank(self) -> int:
        """Which part of a batch this process gets."""
        return self.data_part()

    def get_data_rank_from_global_rank(self, global_rank: int) -> int:
        """Which part of a batch a rank gets."""
        return self.data_part(global_rank)

    def data_slice(self, num_items: int, rank: int | None = None) -> slice:
        """The part of a batch that a rank gets: contiguous, in the order of data ranks, sizes at most one apart.

        Raises:
            InvalidInput: There are fewer items than parts.
        """
        parts, part = self.data_world_size, self.data_part(rank)
        if num_items < parts:
            raise InvalidInput(
                "inputs", f"{num_items} rows cannot be spread over {parts} data ranks; send at least {parts}"
            )
        return slice(num_items * part // parts, num_items * (part + 1) // parts)

    def slice_data(self, items: Sequence[Item], rank: int | None = None) -> list[Item]:
        """A rank's part of ``items``; see ``data_slice``."""
        return list(items[self.data_slice(len(items), rank)])

    def get_slice(self, total_length: int, rank: int | None = None) -> slice:
        """The part of ``total_length`` items that data rank ``rank`` gets, this process's if omitted; may be empty."""
        parts, part = self.data_world_size, self.data_part() if rank is None else rank
        each, left = divmod(total_length, parts)
        start = part * each + min(part, left)
        return slice(start, start + each + (part < left))

    def sequence_ranks(self, rank: int | None = None) -> list[int]:
        """The ranks that share each sequence with this one, in the order of their stretches of it."""
        return self._neighbours(self.ulysses_size or 1, rank)

    def expert_ranks(self, rank: int | None = None) -> list[int]:
        """The ranks that together with this one hold all experts once, in the order of the experts they hold."""
        place = self.coordinates(rank)
        of_stage = self.mesh[tuple(at if name == "pp" else slice(None) for name, at in place.items())]
        names = [name for name in self.mesh_dim_names if name != "pp"]
        # Tensors innermost, then sequences, then data: as Megatron's groups of experts.
        order = [names.index(axis) for axis in AXES if axis in names]
        ranks = of_stage.transpose(order).reshape(-1, self.ep_size or 1, self.etp_size)
        block, _, part = np.argwhere(ranks == self.mesh[tuple(place.values())])[0]
        return [int(other) for other in ranks[block, :, part]]

    def _neighbours(self, size: int, rank: int | None) -> list[int]:
        place = self.coordinates(rank)
        data_axes = tuple(slice(None) if name in DATA_AXES else at for name, at in place.items())
        ranks = self.mesh[data_axes].ravel()  # dp lies outside fsdp, as in data_part
        if "dp" in place and "fsdp" in place and self.mesh_dim_names.index("dp") > self.mesh_dim_names.index("fsdp"):
            ranks = self.mesh[data_axes].T.ravel()
        index = place.get("dp", 0) * self.size("fsdp") + place.get("fsdp", 0)
        start = index - index % size
        return [int(other) for other in ranks[start : start + size]]

    def to_torch_device_mesh(self) -> TorchDeviceMesh:
        """Torch's own mesh of the axes; all ranks must call it together, once they have met."""
        from twinkle.infra.process_group import torch_mesh  # noqa: PLC0415 - a layout is described without torch

        return torch_mesh(self)

    def require_data_axes(
        self,
        user: str,
        *,
        also: Sequence[str] = (),
        model_parallel: str | None = None,
        one_adapter: str | None = None,
    ) -> None:
        """Refuse a layout with more than data parallelism and sharded weights, and the sizes in ``also``.

        Args:
            user: The kind of model.
            also: Further sizes that it has.
            model_parallel: The kind that has those of ``MODEL_PARALLEL``, for the families it knows.
            one_adapter: The kind that has ``ulysses_size`` and ``ep_size``, but trains one adapter at a time.

        Raises:
            ConfigError: Another size is above 1; names it, ``user`` and what to use instead.
        """
        sizes = {f"{axis}_size": self.size(axis) for axis in AXES if axis not in DATA_AXES}
        sizes |= {
            "ulysses_size": self.ulysses_size or 1,
            "ep_size": self.ep_size or 1,
            "etp_size": self.etp_size,
            "vpp_size": self.vpp_size or 1,
        }
        runs = ", ".join(("dp_size", "fsdp_size", *also))
        for name, size in sizes.items():
            if size > 1 and name not in also:
                instead = []
                if model_parallel and name in MODEL_PARALLEL:
                    instead.append(f"use {model_parallel} if it knows the model's family")
                if one_adapter and name in ("ulysses_size", "ep_size"):
                    instead.append(f"train one adapter with {one_adapter}")
                advice = ", or ".join([*instead, "set it to 1"])
                raise ConfigError(f"{name}: is {size}, but {user} runs {runs} only; {advice}")

    # Each axis by name: this process's place on it, and its length; 0 and 1 where the mesh does not have it.

    @property
    def dp_rank(self) -> int:
        """On ``dp``."""
        return self.coordinates().get("dp", 0)

    @property
    def fsdp_rank(self) -> int:
        """On ``fsdp``."""
        return self.coordinates().get("fsdp", 0)

    @property
    def tp_rank(self) -> int:
        """On ``tp``."""
        return self.coordinates().get("tp", 0)

    @property
    def pp_rank(self) -> int:
        """On ``pp``."""
        return self.coordinates().get("pp", 0)

    @property
    def cp_rank(self) -> int:
        """On ``cp``."""
        return self.coordinates().get("cp", 0)

    @property
    def ulysses_rank(self) -> int:
        """Which stretch of each sequence this process holds."""
        return self.sequence_ranks().index(current_rank())

    @property
    def ep_rank(self) -> int:
        """Which of the experts this process holds."""
        return self.expert_ranks().index(current_rank())

    @property
    def dp_world_size(self) -> int:
        """Of ``dp``."""
        return self.size("dp")

    @property
    def fsdp_world_size(self) -> int:
        """Of ``fsdp``."""
        return self.size("fsdp")

    @property
    def tp_world_size(self) -> int:
        """Of ``tp``."""
        return self.size("tp")

    @property
    def pp_world_size(self) -> int:
        """Of ``pp``."""
        return self.size("pp")

    @property
    def cp_world_size(self) -> int:
        """Of ``cp``."""
        return self.size("cp")

    @property
    def ulysses_world_size(self) -> int:
        """How many ranks share each sequence."""
        return self.ulysses_size or 1

    @property
    def ep_world_size(self) -> int:
        """How many ranks hold all experts once together."""
        return self.ep_size or 1

    @property
    def etp_world_size(self) -> int:
        """How many ranks share each expert."""
        return self.etp_size


def current_rank() -> int:
    """The rank of this process, as torchrun and our own launcher say in the environment; 0 when alone."""
    return int(os.environ.get("RANK", "0"))


def current_world_size() -> int:
    """How many processes were started together; 1 when alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))
