"""Adapters as bytes (PEFT files for tenants and tools, snapshots for recovery), and weights on their way to a sampler.

base           what a way from a training to a sampler is, and the way within one process
broadcast      the way from one rank to all the others of the same world
process_group  the way between two groups of devices: gloo, or NCCL where every end has a GPU of its own
ends           what a model and a sampler offer to such a way
manager        keeps a sampler in step with a model, by one of these; ``groups`` where a script has neither
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.checkpoint_engine.base import CheckpointEngine, MemoryCheckpointEngine
    from twinkle.checkpoint_engine.broadcast import BroadcastCheckpointEngine
    from twinkle.checkpoint_engine.ends import CheckpointEngineMixin, CheckpointReceiver, CheckpointSender
    from twinkle.checkpoint_engine.manager import CheckpointEngineManager
    from twinkle.checkpoint_engine.process_group import ProcessGroupCheckpointEngine

__all__ = [
    "BroadcastCheckpointEngine",
    "CheckpointEngine",
    "CheckpointEngineManager",
    "CheckpointEngineMixin",
    "CheckpointReceiver",
    "CheckpointSender",
    "MemoryCheckpointEngine",
    "ProcessGroupCheckpointEngine",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "BroadcastCheckpointEngine": "twinkle.checkpoint_engine.broadcast",
        "CheckpointEngine": "twinkle.checkpoint_engine.base",
        "CheckpointEngineManager": "twinkle.checkpoint_engine.manager",
        "CheckpointEngineMixin": "twinkle.checkpoint_engine.ends",
        "CheckpointReceiver": "twinkle.checkpoint_engine.ends",
        "CheckpointSender": "twinkle.checkpoint_engine.ends",
        "MemoryCheckpointEngine": "twinkle.checkpoint_engine.base",
        "ProcessGroupCheckpointEngine": "twinkle.checkpoint_engine.process_group",
    },
)
