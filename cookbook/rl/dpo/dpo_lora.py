"""Teaches a model which of two answers is preferred (DPO). The base model beneath the adapter is the reference.

MODEL_GPUS=8 python dpo_lora.py
"""

import os
from typing import Any

from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://hjh0119/shareAI-Llama3-DPO-zh-en-emoji")
MODEL_GPUS = int(os.environ.get("MODEL_GPUS", "8"))
DP_SIZE = int(os.environ.get("DP_SIZE", "2"))
"""Copies of the model; each lies in shards on MODEL_GPUS / DP_SIZE ranks."""
NUM_ROWS = int(os.environ.get("NUM_ROWS", "100"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
"""Pairs, at least one for each rank."""
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/dpo_lora")
LOG_EVERY = int(os.environ.get("LOG_EVERY", "5"))

logger = get_logger()


def load_pairs() -> Dataset:
    """Prompts with a preferred and a rejected answer."""
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(NUM_ROWS)))
    dataset.set_template("Template", model_id=MODEL_ID, max_length=2048)
    dataset.map("EmojiDPOProcessor", init_args={"system": "You are a helpful assistant."})
    dataset.encode()
    return dataset


def side_by_side(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Preferred, rejected, preferred, ...: as the loss wants them; ranks get them in pairs."""
    return [row[side] for row in batch for side in ("positive", "negative")]


def train() -> None:
    """Train once over the pairs."""
    mesh = DeviceMesh.from_sizes(fsdp_size=MODEL_GPUS // DP_SIZE, dp_size=DP_SIZE)
    groups = [DeviceGroup(name="model", ranks=MODEL_GPUS, device_type="GPU")]
    twinkle.initialize(mode="ray", groups=groups, global_device_mesh=mesh, lazy_collect=False)
    dataloader = DataLoader(dataset=load_pairs, batch_size=BATCH_SIZE, min_batch_size=MODEL_GPUS, remote_group="model")
    model = TransformersModel(model_id=MODEL_ID, remote_group="model")
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_loss("DPOLoss", beta=0.1)
    model.add_metric("DPOMetric", beta=0.1)
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    logger.info(get_device_placement())
    for step, batch in enumerate(dataloader):
        rows = side_by_side(batch)
        # The same weights without the adapter: a reference that takes no memory.
        reference = model.forward_only(inputs=rows, disable_lora=True)
        model.forward_backward(inputs=rows, ref_outputs=reference)
        model.clip_grad_and_step()
        if step % LOG_EVERY == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {step} of {NUM_ROWS // BATCH_SIZE}, metric: {dict(metric)}")
    logger.info(f"Saved to {model.save('last-checkpoint', output_dir=OUTPUT_DIR)}")


if __name__ == "__main__":
    train()
