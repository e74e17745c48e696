"""Checkpoints: what their names mean, copies of them, and the tokens that open them."""
