"""What files of adapters and checkpoints are called, for rooms that write them and rooms that hand them out."""

from __future__ import annotations

ENCRYPTED_SUFFIX = ".age"
OPTIMIZER_FILE = "optimizer.safetensors"
