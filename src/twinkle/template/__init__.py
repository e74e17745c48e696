"""Conversations to tokens and back, as each family of models wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.data_format.row_error import RowError
    from twinkle.template.base import Template
    from twinkle.template.families import DeepseekV4Template, Gemma4Template, Qwen2_5VLTemplate, Qwen3_5Template

__all__ = [
    "DeepseekV4Template",
    "Gemma4Template",
    "Qwen2_5VLTemplate",
    "Qwen3_5Template",
    "RowError",
    "Template",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "DeepseekV4Template": "twinkle.template.families",
        "Gemma4Template": "twinkle.template.families",
        "Qwen2_5VLTemplate": "twinkle.template.families",
        "Qwen3_5Template": "twinkle.template.families",
        "RowError": "twinkle.data_format.row_error",
        "Template": "twinkle.template.base",
    },
)
