"""Adapters as bytes (PEFT files for tenants and tools, snapshots for recovery), and weights on their way to a sampler.

base       what a way from a training to a sampler is, and the way within one process
broadcast  the way from one rank to all the others
manager    keeps a sampler in step with a model, by one of these
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.checkpoint_engine.base import CheckpointEngine, CheckpointEngineMixin, MemoryCheckpointEngine
    from twinkle.checkpoint_engine.broadcast import BroadcastCheckpointEngine
    from twinkle.checkpoint_engine.manager import CheckpointEngineManager

__all__ = [
    "BroadcastCheckpointEngine",
    "CheckpointEngine",
    "CheckpointEngineManager",
    "CheckpointEngineMixin",
    "MemoryCheckpointEngine",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "BroadcastCheckpointEngine": "twinkle.checkpoint_engine.broadcast",
        "CheckpointEngine": "twinkle.checkpoint_engine.base",
        "CheckpointEngineManager": "twinkle.checkpoint_engine.manager",
        "CheckpointEngineMixin": "twinkle.checkpoint_engine.base",
        "MemoryCheckpointEngine": "twinkle.checkpoint_engine.base",
    },
)
