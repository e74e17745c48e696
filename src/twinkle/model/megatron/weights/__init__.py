"""Weights between Hugging Face's layout and the parts of Megatron's that ranks hold, both ways."""
