"""Agents' loops over the training library: rollouts of several turns, tools, environments."""
