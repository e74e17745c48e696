"""Models by Megatron's core: tensor, pipeline, context and expert parallelism. Needs the extra ``megatron``."""

from __future__ import annotations

from twinkle.model.megatron.bring_up import bring_up

# Before any module of this package imports Megatron's.
bring_up()
