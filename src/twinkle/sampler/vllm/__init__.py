"""Sampling by vLLM, in this process: vLLM computes logits, the rest is ours.

sampler    the state machine: requests in, outcomes out
adapters   adapters as PEFT directories, each version under a number of its own
progress   how far a request has come
engine     the one module that imports vLLM
"""
