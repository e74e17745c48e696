"""Teaches a model at a server to read pictures of formulas, and asks it about some.

    TWINKLE_SERVER_URL=http://localhost:8000 TWINKLE_SERVER_TOKEN=tml-... python multi_modal.py

Pictures become patches on this side, when their row is taken (``LazyDataset``); what is sent is rows of numbers.
"""

import os
from typing import Any

from peft import LoraConfig

from twinkle import get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import DatasetMeta, LazyDataset
from twinkle.preprocessor import Preprocessor
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://AI-ModelScope/LaTeX_OCR")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "500"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "4"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
LOG_EVERY = int(os.environ.get("LOG_EVERY", "10"))
NUM_ASKED = int(os.environ.get("NUM_ASKED", "2"))
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", "64"))
QUESTION = "<image>Write this formula in LaTeX."

logger = get_logger()


class FormulaProcessor(Preprocessor):
    """A picture and what it says, as a conversation."""

    def preprocess(self, row: dict[str, Any]) -> dict[str, Any]:
        """One row."""
        asked = {"role": "user", "content": QUESTION}
        return {"messages": [asked, {"role": "assistant", "content": row["text"]}], "images": [row["image"]]}


def load_rows(num_rows: int, *, as_prompts: bool = False) -> LazyDataset:
    """Rows with their pictures, whole or up to where the answer begins."""
    dataset = LazyDataset(DatasetMeta(DATASET_ID, data_slice=range(num_rows)))
    dataset.set_template("Qwen3_5Template", model_id=MODEL_ID, max_length=2048)
    dataset.map(FormulaProcessor(), remove_columns=["image", "text"])
    dataset.encode(add_generation_prompt=as_prompts)
    return dataset


def for_the_server(row: dict[str, Any]) -> dict[str, Any]:
    """A row without its pictures, whose patches are in it."""
    return {name: value for name, value in row.items() if name not in ("images", "messages")}


def train() -> None:
    """Train once over the data, then ask about some of the pictures."""
    init_twinkle_client()
    dataloader = DataLoader(dataset=load_rows(NUM_ROWS), batch_size=BATCH_SIZE)
    model = MultiLoraTransformersModel(model_id=MODEL_ID)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_loss("CrossEntropyLoss", reduction="sum")
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    for step, batch in enumerate(dataloader):
        model.forward_backward(inputs=[for_the_server(row) for row in batch])
        model.clip_grad_and_step()
        if step % LOG_EVERY == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {dict(metric.result)}")
    path = model.save("formulas", save_optimizer=True)
    logger.info(f"Saved to {path}")
    prompts = load_rows(NUM_ASKED, as_prompts=True)
    sampler = vLLMSampler(model_id=MODEL_ID)
    params = {"max_tokens": MAX_NEW_TOKENS, "temperature": 0.0}
    rows = [for_the_server(prompts[number]) for number in range(NUM_ASKED)]
    for number, response in enumerate(sampler.sample(rows, sampling_params=params, adapter_uri=path)):
        logger.info(f"Picture {number} ({response.sequences[0].stop_reason}): {response.sequences[0].decoded}")


if __name__ == "__main__":
    train()
