"""Sampling: continuous batching over many adapters on one frozen base model."""

from twinkle.sampler.request import SampledSequence, SampleRequest, SampleResult, TopLogprobs
from twinkle.sampler.sampler import Sampler

__all__ = ["SampleRequest", "SampleResult", "SampledSequence", "Sampler", "TopLogprobs"]
