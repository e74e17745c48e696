"""Trains a LoRA on a mixture of experts under Megatron: experts are spread over the ranks that bring different rows.

cookbook/megatron/run.sh tp_moe.py 8
"""

import os

from peft import LoraConfig

import twinkle
from twinkle import DeviceMesh, get_device_placement, get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import MegatronModel
from twinkle.preprocessor import SelfCognitionProcessor

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3-30B-A3B-Instruct-2507")
DATASET_ID = os.environ.get("DATASET_ID", "ms://swift/self-cognition")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "1000"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/megatron_tp_moe")
LOG_EVERY = int(os.environ.get("LOG_EVERY", "20"))

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
TP_SIZE = int(os.environ.get("TP_SIZE", str(min(2, WORLD_SIZE))))
PP_SIZE = int(os.environ.get("PP_SIZE", str(min(2, WORLD_SIZE // TP_SIZE))))
CP_SIZE = int(os.environ.get("CP_SIZE", "1"))
DP_SIZE = WORLD_SIZE // (PP_SIZE * CP_SIZE * TP_SIZE)
EP_SIZE = int(os.environ.get("EP_SIZE", str(DP_SIZE)))

twinkle.initialize(
    mode="local",
    global_device_mesh=DeviceMesh.from_sizes(
        pp_size=PP_SIZE,
        dp_size=DP_SIZE,
        cp_size=CP_SIZE,
        tp_size=TP_SIZE,
        ep_size=EP_SIZE,
    ),
)
logger = get_logger()


def train() -> None:
    """Train once over the rows and save."""
    dataset = Dataset(DatasetMeta(DATASET_ID, data_slice=range(NUM_ROWS)))
    dataset.set_template("Template", model_id=MODEL_ID, max_length=512)
    dataset.map(SelfCognitionProcessor("Twinkle", "the Twinkle community"))
    dataset.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=BATCH_SIZE)

    model = MegatronModel(model_id=MODEL_ID)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_optimizer("default", lr=LEARNING_RATE)
    model.set_lr_scheduler("default", max_lr=LEARNING_RATE, lr_decay_steps=len(dataloader))
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
