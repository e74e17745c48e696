"""Where models and data sets come from: folders, the hubs' caches, the hubs; and tiny models made on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.hub.model_card import ModelCard
    from twinkle.hub.model_path import resolve_model_id
    from twinkle.hub.operation import HFHub, HubOperation, MSHub

__all__ = ["HFHub", "HubOperation", "MSHub", "ModelCard", "resolve_model_id"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "HFHub": "twinkle.hub.operation",
        "HubOperation": "twinkle.hub.operation",
        "MSHub": "twinkle.hub.operation",
        "ModelCard": "twinkle.hub.model_card",
        "resolve_model_id": "twinkle.hub.model_path",
    },
)
