"""Conversations to tokens and back, as each family of models wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.template.base import Template
    from twinkle.template.errors import RowError

__all__ = ["RowError", "Template"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "RowError": "twinkle.template.errors",
        "Template": "twinkle.template.base",
    },
)
