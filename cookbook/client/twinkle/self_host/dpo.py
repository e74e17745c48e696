"""Teaches a model at a server which of two answers is preferred. The base model itself is the reference.

TWINKLE_SERVER_URL=http://localhost:8000 TWINKLE_SERVER_TOKEN=tml-... python dpo.py
"""

import os
from typing import Any

from peft import LoraConfig

from twinkle import get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://hjh0119/shareAI-Llama3-DPO-zh-en-emoji")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "100"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "4"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
LOG_EVERY = int(os.environ.get("LOG_EVERY", "5"))

logger = get_logger()


def load_pairs() -> DataLoader:
    """Prompts with a preferred and a rejected answer."""
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(NUM_ROWS)))
    dataset.set_template("Qwen3_5Template", model_id=MODEL_ID, max_length=2048)
    dataset.map("EmojiDPOProcessor", init_args={"system": "You are a helpful assistant."})
    dataset.encode()
    return DataLoader(dataset=dataset, batch_size=BATCH_SIZE)


def side_by_side(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Preferred, rejected, preferred, ...: as the loss wants them."""
    return [row[side] for row in batch for side in ("positive", "negative")]


def train() -> None:
    """Train once over the pairs."""
    init_twinkle_client()
    dataloader = load_pairs()
    model = MultiLoraTransformersModel(model_id=MODEL_ID)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_loss("DPOLoss", beta=0.1)
    model.add_metric("DPOMetric", beta=0.1)
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    for step, batch in enumerate(dataloader):
        rows = side_by_side(batch)
        # The same weights without the adapter: a reference that takes no memory.
        reference = model.forward_only(inputs=rows, disable_lora=True)
        model.forward_backward(inputs=rows, ref_outputs=reference.result)
        model.clip_grad_and_step()
        if step % LOG_EVERY == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {dict(metric.result)}")
    logger.info(f"Saved to {model.save('dpo', save_optimizer=True)}")


if __name__ == "__main__":
    train()
