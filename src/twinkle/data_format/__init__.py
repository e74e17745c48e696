"""The values that the library's components hand to each other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle.data_format.batch import InputFeature, LossOutput, ModelOutput
    from twinkle.data_format.conversation import Message, Tool, ToolCall, Trajectory
    from twinkle.data_format.sampling import SampledSequence, SampleResponse, SamplingParams

__all__ = [
    "InputFeature",
    "LossOutput",
    "Message",
    "ModelOutput",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "Tool",
    "ToolCall",
    "Trajectory",
]

_MODULES = {
    "InputFeature": "twinkle.data_format.batch",
    "LossOutput": "twinkle.data_format.batch",
    "Message": "twinkle.data_format.conversation",
    "ModelOutput": "twinkle.data_format.batch",
    "SampleResponse": "twinkle.data_format.sampling",
    "SampledSequence": "twinkle.data_format.sampling",
    "SamplingParams": "twinkle.data_format.sampling",
    "Tool": "twinkle.data_format.conversation",
    "ToolCall": "twinkle.data_format.conversation",
    "Trajectory": "twinkle.data_format.conversation",
}


def __getattr__(name: str) -> object:
    """Load the module of a public name when it is first asked for: most of these need no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
