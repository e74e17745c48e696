"""What clients call a base model."""

from __future__ import annotations

HUB_SCHEMES = ("ms://", "hf://")


def plain_model_name(name: str) -> str:
    """A model's name without the hub it comes from, which scripts put before it, some of them twice."""
    while name.startswith(HUB_SCHEMES):
        name = name[len(HUB_SCHEMES[0]) :]
    return name
