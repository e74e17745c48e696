"""LoRA adapters on Megatron's layers: published as PEFT has them, held in parts as the layers are."""
