"""What Megatron's core has only for Transformer Engine, or not at all, in plain torch."""
