"""What files of adapters and checkpoints are called, for rooms that write them and rooms that hand them out."""

from __future__ import annotations

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
"""As PEFT calls them."""
ENCRYPTED_SUFFIX = ".age"
OPTIMIZER_FILE = "optimizer.safetensors"
OPTIMIZER_SETTINGS_FILE = "optimizer.json"
SCHEDULER_FILE = "scheduler.json"
GRADIENTS_FILE = "gradients.safetensors"
TRAINER_FILE = "trainer_state.json"
TRAINING_FILES = frozenset({OPTIMIZER_FILE, OPTIMIZER_SETTINGS_FILE, SCHEDULER_FILE, GRADIENTS_FILE, TRAINER_FILE})
"""What only whoever goes on training needs."""
