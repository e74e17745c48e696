"""Many tenants' adapters on one base model by Megatron's core, as a worker serves them."""
