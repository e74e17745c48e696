"""Where scripts import it from."""

from twinkle.sampler.scripts.base import Sampler

__all__ = ["Sampler"]
