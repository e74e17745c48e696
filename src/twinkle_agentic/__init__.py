"""Agents' loops over the training library.

rollout       conversations of several turns with a sampler, token by token what was sampled
tools         what a model may call
envs          what its calls change: environments, pools of them, and how they become tools
reward        how good a conversation with tools was
preprocessor  filters of data by quality, from rules, or from what a model makes of it
protocol      models behind an address
sampler       a sampler that asks a stronger model where it is not sure
condenser     long conversations made shorter by a model or by rules, and taken apart for it (``chunker``)
data_format   the passages that these hand to each other
"""
