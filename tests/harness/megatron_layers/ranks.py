"""The packed row of a layout of ranks, and what its ranks found put together."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed

from twinkle.model.megatron.modules.packed import PackedRow

LENGTHS = (5, 70, 1, 33)
HIDDEN = 32
Found = dict[str, tuple[float, float]]
"""By what is compared, how far apart the two are and how large it is."""
Layout = dict[str, Any]


def config_of(layout: Layout, kind: type[TransformerConfig] = TransformerConfig, **settings: Any) -> TransformerConfig:
    return kind(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        layernorm_epsilon=1e-6,
        **layout,
        **settings,
    )


class Ranks:
    """The packed row of one layout, and what its ranks found put together."""

    def __init__(self, layout: Layout) -> None:
        self.groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp", "ep"])
        self.is_sequence_parallel = layout.get("sequence_parallel", False)
        cp, tp = self.groups.cp, self.groups.tp
        self.row = PackedRow.of(LENGTHS, cp_size=cp.size(), cp_rank=cp.rank(), tp_size=tp.size())

    def own(self, values: list[torch.Tensor]) -> torch.Tensor:
        """This rank's tokens of the sequences [N, ..]."""
        own_N = self.row.own(self.row.place(values))
        return own_N.chunk(self.groups.tp.size())[self.groups.tp.rank()] if self.is_sequence_parallel else own_N

    def together(self, own_N: torch.Tensor) -> torch.Tensor:
        """All sequences' tokens, one after another, from those of all ranks."""
        if self.is_sequence_parallel:
            own_N = gathered(own_N, self.groups.tp)
        whole_T = gathered(own_N, self.groups.cp)[self.row.gathered_order()]
        return torch.cat(self.row.restore(whole_T))

    def shard(self, weight: torch.Tensor, sizes: tuple[int, ...] | None = None, axis: int = 0) -> torch.Tensor:
        """This tensor rank's share of each part of a weight."""
        size, rank = self.groups.tp.size(), self.groups.tp.rank()
        parts = weight.split(list(sizes or (weight.shape[axis],)), dim=axis)
        return torch.cat([part.chunk(size, dim=axis)[rank] for part in parts], dim=axis)


def gathered(value: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(value) for _ in range(group.size())]
    distributed.all_gather(parts, value.detach().contiguous(), group=group)
    return torch.cat(parts)


def apart(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return (found - expected).abs().max().item(), expected.abs().max().item()


def drawn(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(length, *shape) for length in LENGTHS]


def gradient_of(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad
