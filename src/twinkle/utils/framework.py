"""What scripts ask torch about this rank, under the path they ask it."""

from twinkle.infra.frameworks import Framework, Torch

__all__ = ["Framework", "Torch"]
