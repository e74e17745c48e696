"""The values that the library's components hand to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.data_format.answers import Answer, MetricResults, ModelOutput, SavedCheckpoint
    from twinkle.data_format.batch import InputFeature, LossOutput
    from twinkle.data_format.conversation import Message, Tool, ToolCall, Trajectory, pack_value, user_data_get
    from twinkle.data_format.row_error import RowError
    from twinkle.data_format.sampling import SampledSequence, SampleResponse, SampleResponses, SamplingParams

__all__ = [
    "Answer",
    "InputFeature",
    "LossOutput",
    "Message",
    "MetricResults",
    "ModelOutput",
    "RowError",
    "SampleResponse",
    "SampleResponses",
    "SampledSequence",
    "SamplingParams",
    "SavedCheckpoint",
    "Tool",
    "ToolCall",
    "Trajectory",
    "pack_value",
    "user_data_get",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Answer": "twinkle.data_format.answers",
        "InputFeature": "twinkle.data_format.batch",
        "LossOutput": "twinkle.data_format.batch",
        "Message": "twinkle.data_format.conversation",
        "MetricResults": "twinkle.data_format.answers",
        "ModelOutput": "twinkle.data_format.answers",
        "RowError": "twinkle.data_format.row_error",
        "SampleResponse": "twinkle.data_format.sampling",
        "SampleResponses": "twinkle.data_format.sampling",
        "SampledSequence": "twinkle.data_format.sampling",
        "SamplingParams": "twinkle.data_format.sampling",
        "SavedCheckpoint": "twinkle.data_format.answers",
        "Tool": "twinkle.data_format.conversation",
        "ToolCall": "twinkle.data_format.conversation",
        "Trajectory": "twinkle.data_format.conversation",
        "pack_value": "twinkle.data_format.conversation",
        "user_data_get": "twinkle.data_format.conversation",
    },
)
