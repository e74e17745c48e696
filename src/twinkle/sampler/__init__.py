"""Sampling: continuous batching over many adapters on one frozen base model."""

from twinkle.sampler.base import Outcome, PromptEncoder, Sampler
from twinkle.sampler.request import AdapterFiles, DrawnSequence, SampleRequest, SampleResult, TopLogprobs
from twinkle.sampler.torch_sampler import TorchSampler
from twinkle.sampler.vllm.sampler import VLLMSampler

vLLMSampler = VLLMSampler  # noqa: N816 - the name under which scripts know it

__all__ = [
    "AdapterFiles",
    "DrawnSequence",
    "Outcome",
    "PromptEncoder",
    "SampleRequest",
    "SampleResult",
    "Sampler",
    "TopLogprobs",
    "TorchSampler",
    "VLLMSampler",
    "vLLMSampler",
]
