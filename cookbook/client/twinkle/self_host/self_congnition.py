"""Teaches a model at a server who it is. Needs no torch here: data are made on this side, training is the server's.

    TWINKLE_SERVER_URL=http://localhost:8000 TWINKLE_SERVER_TOKEN=tml-... python self_congnition.py

Stopped in the middle it goes on with the next batch: ``RESUME_FROM=twinkle://<run>/weights/step-20``.
"""

import os

from peft import LoraConfig

from twinkle import get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.preprocessor import SelfCognitionProcessor
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://swift/self-cognition")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "500"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "4"))
ACCUMULATION = int(os.environ.get("ACCUMULATION", "2"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
LOG_EVERY = int(os.environ.get("LOG_EVERY", "10"))
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "20"))
RESUME_FROM = os.environ.get("RESUME_FROM", "")

logger = get_logger()


def load_rows() -> DataLoader:
    """Rows with names filled in, encoded, in batches."""
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(NUM_ROWS)))
    dataset.set_template("Qwen3_5Template", model_id=MODEL_ID, max_length=512)
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle community"))
    dataset.encode()
    return DataLoader(dataset=dataset, batch_size=BATCH_SIZE)


def train() -> None:
    """Train once over the data, and save now and then."""
    client = init_twinkle_client()
    logger.info(f"Served: {[model.model_name for model in client.get_server_capabilities().supported_models]}")
    dataloader = load_rows()
    model = MultiLoraTransformersModel(model_id=MODEL_ID)
    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    model.add_adapter_to_model("default", config, gradient_accumulation_steps=ACCUMULATION)
    model.set_loss("CrossEntropyLoss", reduction="sum")
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=2, num_training_steps=len(dataloader))
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
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {dict(metric.result)}")
        if (step + 1) % SAVE_EVERY == 0:
            save(model, dataloader, f"step-{step + 1}")
    save(model, dataloader, "last")


def save(model: MultiLoraTransformersModel, dataloader: DataLoader, name: str) -> None:
    """A checkpoint from which training goes on: weights, optimizer, schedule, and how much of the data is consumed."""
    consumed = dataloader.get_state()["consumed_train_samples"]
    path = model.save(name, save_optimizer=True, consumed_train_samples=consumed)
    logger.info(f"Saved to {path}")


if __name__ == "__main__":
    train()
