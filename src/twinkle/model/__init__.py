"""How a training step is computed: one frozen base model, many adapters, fused and exact."""
