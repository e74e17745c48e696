"""Changes to a model's modules that can be taken back."""
