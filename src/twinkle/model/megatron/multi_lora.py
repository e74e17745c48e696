"""Many adapters on one frozen base model by Megatron's core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.core.errors import BatchTooLong, InvalidInput, NoRoom
from twinkle.infra import DeviceMesh
from twinkle.model.base import Rows
from twinkle.model.forward_pass import PassOptions
from twinkle.model.megatron.batch import RowBatch, Sequences
from twinkle.model.megatron.lora.adapter import MegatronAdapter
from twinkle.model.megatron.model import MegatronModel
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.peft_config import ALL_LINEAR
from twinkle.model.placement import MixedPrecision


class MultiLoraMegatronModel(MegatronModel):
    """A frozen base model spread over ranks, with room for ``max_loras`` adapters of rank up to ``max_r``.

    Every call needs an adapter that was added; a pass is one adapter's.

    Args:
        model_id, config, device_mesh, mixed_precision, load_weights, recompute_granularity, recompute_method,
            recompute_num_layers, recompute_modules, megatron_settings: As for ``MegatronModel``.
        max_loras: Adapters at a time.
        max_r: Their largest rank.
        max_length: Tokens of all rows of one batch on a rank.
        target_modules: What an adapter trains whose config does not say.
    """

    def __init__(
        self,
        model_id: str | None = None,
        config: Any = None,
        ddp_config: Mapping[str, Any] | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision | None = None,
        load_weights: bool = True,
        recompute_granularity: str | None = "full",
        recompute_method: str | None = "uniform",
        recompute_num_layers: int | None = 1,
        recompute_modules: Sequence[str] | None = None,
        *,
        max_loras: int = 5,
        max_r: int = 32,
        max_length: int = 8192,
        target_modules: str | Sequence[str] = ALL_LINEAR,
        **megatron_settings: Any,
    ) -> None:
        super().__init__(
            model_id,
            config,
            ddp_config,
            device_mesh,
            mixed_precision,
            load_weights,
            recompute_granularity,
            recompute_method,
            recompute_num_layers,
            recompute_modules,
            **megatron_settings,
        )
        self.max_loras, self.max_r, self.max_length = max_loras, max_r, max_length
        self._default_modules = target_modules
        self._freeze()

    def _admit(self, adapter: MegatronAdapter) -> None:
        if len(self._adapters) >= self.max_loras:
            raise NoRoom(f"max_loras: all {self.max_loras} slots are taken; remove_adapter one first")
        rank = max([adapter.config.r, *(adapter.config.rank_pattern or {}).values()])
        if rank > self.max_r:
            raise NoRoom(f"r: is {rank}, max_r is {self.max_r}; lower it, or load the model with a larger max_r")

    def remove_adapter(self, adapter_name: str) -> None:
        """Forget an adapter and everything set for it; its slot is free again."""
        group = self.group(adapter_name)
        group.forwarding.close()
        del self.optimizer_group[group.name], self._adapters[group.name]

    def _parts(self, group: OptimizerGroup, rows: Rows, options: PassOptions) -> tuple[RowBatch, list[Sequences]]:
        if not group.name:
            raise InvalidInput("adapter_name", "is missing; every call names an adapter")
        batch, parts = super()._parts(group, rows, options)
        num_tokens = sum(batch.sequences.lengths)
        if num_tokens > self.max_length:
            raise BatchTooLong(
                "inputs", f"hold {num_tokens} tokens, max_length is {self.max_length}; send fewer rows at once"
            )
        return batch, parts
