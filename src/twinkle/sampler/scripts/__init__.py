"""The samplers of scripts: rows or conversations in, responses out, on top of the samplers that the service steps.

base        what a script's own sampler is
rows        a row as a request, a result as a response
adapters    whose weights a call samples with
calls       the sampler over a stepped one: everything but the loading
local       TorchSampler and vLLMSampler: a model's id in, a sampler out
"""
