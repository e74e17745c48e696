"""The LoRA pool and the packed attention that a frozen base model is fitted with."""
