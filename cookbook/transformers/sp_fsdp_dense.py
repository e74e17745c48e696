"""Trains on rows too long for one device: a group of ranks shares each row out (Ulysses), and the model's shards.

ULYSSES_SIZE=2 cookbook/transformers/run.sh sp_fsdp_dense.py 4
"""

import os

from peft import LoraConfig

import twinkle
from twinkle import DeviceMesh, get_device_placement, get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://swift/self-cognition")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "1000"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "4"))
MAX_LENGTH = int(os.environ.get("MAX_LENGTH", "32768"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/sp_fsdp_dense")
LOG_EVERY = int(os.environ.get("LOG_EVERY", "20"))

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
ULYSSES_SIZE = int(os.environ.get("ULYSSES_SIZE", WORLD_SIZE))

twinkle.initialize(
    mode="local", global_device_mesh=DeviceMesh.from_sizes(fsdp_size=WORLD_SIZE, ulysses_size=ULYSSES_SIZE)
)
logger = get_logger()


def train() -> None:
    """Train once over the rows and save."""
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(NUM_ROWS)))
    dataset.set_template("Template", model_id=MODEL_ID, max_length=MAX_LENGTH)
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle community"))
    dataset.encode()
    # Ranks that share rows get the same ones.
    dataloader = DataLoader(dataset=dataset, batch_size=BATCH_SIZE)

    model = TransformersModel(model_id=MODEL_ID)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=5, num_training_steps=len(dataloader))
    logger.info(get_device_placement())
    logger.info(model.get_train_configs())

    for step, batch in enumerate(dataloader):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        if step % LOG_EVERY == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {metric}")
    logger.info(f"Saved to {model.save('last-checkpoint', output_dir=OUTPUT_DIR)}")


if __name__ == "__main__":
    train()
