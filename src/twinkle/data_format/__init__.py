"""The values that the library's components hand to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.lazy import lazy_attributes

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

__getattr__ = lazy_attributes(
    __name__,
    {
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
    },
)
