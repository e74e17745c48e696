"""Changes to a model's modules that can be taken back.

A package of one's own declares its patches by name in the entry points ``twinkle.patches``.
"""

from __future__ import annotations

from twinkle.plugin.patching import PATCHES, Patch, apply_context, apply_patch, unpatch

__all__ = ["PATCHES", "Patch", "apply_context", "apply_patch", "unpatch"]
