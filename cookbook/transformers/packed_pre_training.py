"""Trains all parameters on plain text in packed rows: every row is as long as the model is given at once.

    DATASET_ID=texts.jsonl python cookbook/transformers/packed_pre_training.py

A text stands in the column ``text``. Several share a row, none sees the others, and each begins at position 0.
"""

import os

from twinkle import get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import DatasetMeta, PackingDataset
from twinkle.model import TransformersModel

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3-4B")
DATASET_ID = os.environ.get("DATASET_ID", "texts.jsonl")
MAX_LENGTH = int(os.environ.get("MAX_LENGTH", "2048"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "4"))
EPOCHS = int(os.environ.get("EPOCHS", "1"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-5"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/packed_pre_training")
LOG_EVERY = int(os.environ.get("LOG_EVERY", "20"))

logger = get_logger()


def train() -> None:
    """Pack once, train over it as often as asked, save the whole model."""
    dataset = PackingDataset(DatasetMeta(DATASET_ID))
    dataset.set_template(
        "Template", model_id=MODEL_ID, use_chat_template=False, max_length=MAX_LENGTH, truncation_strategy="right"
    )
    dataset.encode()
    dataset.pack_dataset()
    dataloader = DataLoader(dataset=dataset, batch_size=BATCH_SIZE)

    model = TransformersModel(model_id=MODEL_ID)
    model.set_processor("InputProcessor", padding_free=True)
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    steps = EPOCHS * len(dataloader)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=min(10, steps), num_training_steps=steps)

    step = 0
    for _ in range(EPOCHS):
        for batch in dataloader:
            model.forward_backward(inputs=batch)
            model.clip_grad_and_step()
            if step % LOG_EVERY == 0:
                metric = model.calculate_metric(is_training=True)
                logger.info(f"Current is step {step} of {steps}, metric: {metric}")
            step += 1
    logger.info(f"Saved to {model.save('last-checkpoint', output_dir=OUTPUT_DIR)}")


if __name__ == "__main__":
    train()
