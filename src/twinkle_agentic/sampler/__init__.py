"""Samplers made of others."""

from twinkle_agentic.sampler.router import RouterSampler

__all__ = ["RouterSampler"]
