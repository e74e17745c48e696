"""Sampling: continuous batching over many adapters on one frozen base model."""

from twinkle.sampler.base import Outcome, PromptEncoder, Sampler
from twinkle.sampler.request import SampledSequence, SampleRequest, SampleResult, TopLogprobs
from twinkle.sampler.torch_sampler import TorchSampler

__all__ = [
    "Outcome",
    "PromptEncoder",
    "SampleRequest",
    "SampleResult",
    "SampledSequence",
    "Sampler",
    "TopLogprobs",
    "TorchSampler",
]
