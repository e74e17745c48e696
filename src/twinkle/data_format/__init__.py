"""The values that the library's components hand to each other."""

from twinkle.data_format.sampling import SampledSequence, SampleResponse, SamplingParams

__all__ = ["SampleResponse", "SampledSequence", "SamplingParams"]
