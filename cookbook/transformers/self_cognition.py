"""Teaches a model who it is: a LoRA on one device, or on the CPU.

    python cookbook/transformers/self_cognition.py

Stopped in the middle it goes on with the next batch: ``RESUME_FROM=output/self_cognition/checkpoint-50``.
"""

import os

from peft import LoraConfig

from twinkle import get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://swift/self-cognition")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "1000"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/self_cognition")
LOG_EVERY = int(os.environ.get("LOG_EVERY", "20"))
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "50"))
RESUME_FROM = os.environ.get("RESUME_FROM", "")

logger = get_logger()


def load_rows(first: int, last: int) -> Dataset:
    """Rows `first` to `last` of the data set, which begins anew when there are fewer, with names filled in."""
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(first, last)))
    dataset.set_template("Qwen3_5Template", model_id=MODEL_ID, max_length=512)
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle community"))
    return dataset


def evaluate(model: TransformersModel, dataset: Dataset) -> float:
    """The loss on rows that are not trained on now."""
    for batch in DataLoader(dataset=dataset, batch_size=BATCH_SIZE):
        model.forward_only(inputs=batch)
        model.calculate_loss()
    return float(model.calculate_metric(is_training=False)["loss"])


def train() -> None:
    """Look at the data, train once over it, save."""
    dataset, held_out = load_rows(0, NUM_ROWS), load_rows(0, 2 * BATCH_SIZE)
    # Which rows are wrong, how long they are, which tokens train: before a device is busy with them.
    logger.info(dataset.report())
    dataset.encode()
    held_out.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=BATCH_SIZE, shuffle=True)

    model = TransformersModel(model_id=MODEL_ID)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=5, num_training_steps=len(dataloader))
    logger.info(model.get_train_configs())

    first = 0
    if RESUME_FROM:
        progress = model.resume_from_checkpoint(RESUME_FROM)
        dataloader.resume_from_checkpoint(progress["consumed_train_samples"])
        first = progress["cur_step"]
    for step, batch in enumerate(dataloader, first):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        if step % LOG_EVERY == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {metric}")
        if (step + 1) % SAVE_EVERY == 0:
            save(model, dataloader, f"checkpoint-{step + 1}")
    logger.info(f"Loss at the end: {evaluate(model, held_out):.4f}")
    save(model, dataloader, "last-checkpoint")


def save(model: TransformersModel, dataloader: DataLoader, name: str) -> None:
    """A checkpoint from which training goes on: weights, optimizer, schedule, and how much of the data is consumed."""
    consumed = dataloader.get_state()["consumed_train_samples"]
    path = model.save(name, output_dir=OUTPUT_DIR, save_optimizer=True, consumed_train_samples=consumed)
    logger.info(f"Saved to {path}")


if __name__ == "__main__":
    train()
