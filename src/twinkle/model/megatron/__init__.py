"""Models by Megatron's core: tensor, pipeline, context and expert parallelism. Needs the extra ``megatron``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes
from twinkle.model.megatron.bring_up import bring_up

if TYPE_CHECKING:
    from twinkle.model.megatron.model import MegatronModel
    from twinkle.model.megatron.multi_lora import MultiLoraMegatronModel

__all__ = ["MegatronModel", "MultiLoraMegatronModel"]

# Before any module of this package imports Megatron's.
bring_up()

__getattr__ = lazy_attributes(
    __name__,
    {
        "MegatronModel": "twinkle.model.megatron.model",
        "MultiLoraMegatronModel": "twinkle.model.megatron.multi_lora",
    },
)
