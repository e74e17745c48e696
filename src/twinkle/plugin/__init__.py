"""Objects that scripts name instead of making: by the names of packages, and by the ids of plugins."""

from __future__ import annotations

from twinkle.plugin.loading import Plugin

__all__ = ["Plugin"]
