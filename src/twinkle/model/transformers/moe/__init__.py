"""What mixtures of experts need of a training loop."""
