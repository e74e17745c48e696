"""The arguments of training scripts (``CLI.from_args()``)."""
