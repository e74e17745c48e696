"""Trains all parameters of a mixture of experts; each rank holds some of the experts and tokens travel to them.

EP_SIZE=2 cookbook/transformers/run.sh ep_fsdp_qwen3_moe.py 4
"""

import os

import twinkle
from twinkle import DeviceMesh, get_device_placement, get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3-30B-A3B-Instruct-2507")
DATASET_ID = os.environ.get("DATASET_ID", "ms://swift/self-cognition")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "1000"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "4"))
ACCUMULATION = int(os.environ.get("ACCUMULATION", "4"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-5"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/ep_fsdp_qwen3_moe")
LOG_EVERY = int(os.environ.get("LOG_EVERY", "20"))

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
EP_SIZE = int(os.environ.get("EP_SIZE", WORLD_SIZE))

twinkle.initialize(mode="local", global_device_mesh=DeviceMesh.from_sizes(fsdp_size=WORLD_SIZE, ep_size=EP_SIZE))
logger = get_logger()


def train() -> None:
    """Train once over the rows and save the whole model, experts put together again."""
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(NUM_ROWS)))
    dataset.set_template("Template", model_id=MODEL_ID, max_length=512)
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle community"))
    dataset.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=BATCH_SIZE)

    model = TransformersModel(model_id=MODEL_ID, fsdp_config={"expert_parallel": {"enabled": True}})
    model.set_optimizer("AdamW", lr=LEARNING_RATE, foreach=False)
    model.set_lr_scheduler(
        "CosineWarmupScheduler", num_warmup_steps=5, num_training_steps=len(dataloader) // ACCUMULATION
    )
    logger.info(get_device_placement())
    logger.info(model.get_train_configs())

    for step, batch in enumerate(dataloader):
        model.forward_backward(inputs=batch, gradient_accumulation_steps=ACCUMULATION)
        model.clip_grad_and_step()
        if step % LOG_EVERY == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {metric}")
    logger.info(f"Saved to {model.save('last-checkpoint', output_dir=OUTPUT_DIR)}")


if __name__ == "__main__":
    train()
