"""Sampling sessions, and the weights without a name that some of them sample from."""
