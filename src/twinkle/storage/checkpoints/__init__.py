"""Checkpoints, sampling sessions on them, copies, and the tokens that open them."""
