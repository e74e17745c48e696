"""Sampling: continuous batching over many adapters on one frozen base model.

For the service (``stepped``, ``torch_sampler``, ``vllm``): requests in, outcomes out, one step after the other.
For scripts (``scripts``): rows or conversations in, responses out, on top of these.
"""

from twinkle.sampler.request import AdapterFiles, DrawnSequence, SampleRequest, SampleResult, TopLogprobs
from twinkle.sampler.scripts.base import PromptEncoder, Sampler
from twinkle.sampler.scripts.calls import SteppingSampler
from twinkle.sampler.scripts.local import TorchSampler, VLLMSampler
from twinkle.sampler.stepped import Outcome, SteppedSampler
from twinkle.sampler.torch_sampler import SteppedTorchSampler
from twinkle.sampler.vllm.sampler import SteppedVLLMSampler

vLLMSampler = VLLMSampler  # noqa: N816 - the name under which scripts know it

__all__ = [
    "AdapterFiles",
    "DrawnSequence",
    "Outcome",
    "PromptEncoder",
    "SampleRequest",
    "SampleResult",
    "Sampler",
    "SteppedSampler",
    "SteppedTorchSampler",
    "SteppedVLLMSampler",
    "SteppingSampler",
    "TopLogprobs",
    "TorchSampler",
    "VLLMSampler",
    "vLLMSampler",
]
