"""Trains a LoRA, or with ``FULL=1`` all parameters, over several ranks: shards of the model times copies of it.

    cookbook/transformers/run.sh fsdp2.py 8
    FSDP_SIZE=4 cookbook/transformers/run.sh fsdp2.py 8        # two copies, each in four shards

The best checkpoint by the evaluation is kept; ``RESUME_FROM`` goes on from one, also on another number of ranks.
"""

import os

from peft import LoraConfig

import twinkle
from twinkle import DeviceMesh, get_device_placement, get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://swift/self-cognition")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "1000"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
FULL = os.environ.get("FULL", "0") == "1"
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-5" if FULL else "1e-4"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/fsdp2")
LOG_EVERY = int(os.environ.get("LOG_EVERY", "20"))
RESUME_FROM = os.environ.get("RESUME_FROM", "")
EVALUATE_EVERY = int(os.environ.get("EVALUATE_EVERY", "40"))

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
FSDP_SIZE = int(os.environ.get("FSDP_SIZE", WORLD_SIZE))

twinkle.initialize(
    mode="local",
    global_device_mesh=DeviceMesh.from_sizes(fsdp_size=FSDP_SIZE, dp_size=WORLD_SIZE // FSDP_SIZE),
)
logger = get_logger()


def load_rows(num_rows: int) -> Dataset:
    """So many rows as tokens; the data set begins anew when it has fewer."""
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(num_rows)))
    dataset.set_template("Qwen3_5Template", model_id=MODEL_ID, max_length=512)
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle community"))
    dataset.encode()
    return dataset


def evaluate(model: TransformersModel, dataloader: DataLoader) -> float:
    """The loss over all ranks on rows that are held out."""
    for batch in dataloader:
        model.forward_only(inputs=batch)
        model.calculate_loss()
    return float(model.calculate_metric(is_training=False)["loss"])


def train() -> None:
    """Train once over the rows; every so often evaluate, and save what is better than before."""
    # The batch is of all ranks; each takes its part.
    dataloader = DataLoader(dataset=load_rows(NUM_ROWS), batch_size=BATCH_SIZE)
    held_out = DataLoader(dataset=load_rows(2 * BATCH_SIZE), batch_size=BATCH_SIZE)

    model = TransformersModel(model_id=MODEL_ID)
    if not FULL:
        model.add_adapter_to_model(
            "default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"), gradient_accumulation_steps=2
        )
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=5, num_training_steps=len(dataloader))
    logger.info(get_device_placement())
    logger.info(model.get_train_configs())

    first = 0
    if RESUME_FROM:
        progress = model.resume_from_checkpoint(RESUME_FROM)
        dataloader.resume_from_checkpoint(progress["consumed_train_samples"])
        first = progress["cur_step"]
    best = float("inf")
    for step, batch in enumerate(dataloader, first):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        if step % LOG_EVERY == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {metric}")
        if step > 0 and step % EVALUATE_EVERY == 0:
            loss = evaluate(model, held_out)
            logger.info(f"Evaluation at step {step}: {loss:.4f}")
            if loss < best:
                best = loss
                save(model, dataloader, "best-checkpoint")
    save(model, dataloader, "last-checkpoint")


def save(model: TransformersModel, dataloader: DataLoader, name: str) -> None:
    """A checkpoint from which training goes on."""
    consumed = dataloader.get_state()["consumed_train_samples"]
    model.save(name, output_dir=OUTPUT_DIR, save_optimizer=True, consumed_train_samples=consumed)


if __name__ == "__main__":
    train()
