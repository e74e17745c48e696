"""Teaches a model at a server which sentences belong together: a question's vector near that of its answer (InfoNCE).

    TWINKLE_SERVER_URL=http://localhost:8000 TWINKLE_SERVER_TOKEN=tml-... python embedding.py

Rows come in pairs: the question, whose label is 1, and its answer, whose label is 0. The answers of the others are what
a question is told apart from.
"""

import json
import os
from pathlib import Path
from typing import Any

from peft import LoraConfig

from twinkle import get_logger
from twinkle.template import Qwen3_5Template
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
PAIRS_FILE = os.environ.get("PAIRS_FILE", "")
"""Lines of JSON, each a list of a question and its answer; those below if omitted."""
MAX_LENGTH = int(os.environ.get("MAX_LENGTH", "512"))
MAX_STEPS = int(os.environ.get("MAX_STEPS", "10"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
TEMPERATURE = float(os.environ.get("TEMPERATURE", "0.07"))
PAIRS = [
    ["Where is the Eiffel Tower?", "The Eiffel Tower stands in Paris."],
    ["How many legs does a spider have?", "Spiders walk on eight legs."],
    ["What do bees make?", "Bees turn nectar into honey."],
    ["When does water freeze?", "At zero degrees Celsius water becomes ice."],
]

logger = get_logger()


def load_rows() -> list[dict[str, Any]]:
    """Both sentences of every pair, one after the other, in tokens."""
    pairs = [json.loads(line) for line in Path(PAIRS_FILE).read_text().splitlines()] if PAIRS_FILE else PAIRS
    tokenizer = Qwen3_5Template(MODEL_ID).tokenizer
    return [
        {"input_ids": tokenizer.encode(sentence)[:MAX_LENGTH], "labels": [int(is_question)]}
        for pair in pairs
        for sentence, is_question in zip(pair, (True, False), strict=True)
    ]


def train() -> None:
    """The same batch again and again: its answers are all there is to tell apart."""
    init_twinkle_client()
    model = MultiLoraTransformersModel(model_id=MODEL_ID)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_loss("InfonceLoss", temperature=TEMPERATURE, use_batch=True)
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    model.add_metric("EmbeddingMetric", is_training=True)
    rows = load_rows()
    for step in range(MAX_STEPS):
        model.forward_backward(inputs=rows, task="embedding")
        model.clip_grad_and_step(max_grad_norm=1.0)
        metrics = dict(model.calculate_metric(is_training=True).result)
        logger.info(f"Current is step {step} of {MAX_STEPS}, metric: {metrics}")
    logger.info(f"Saved to {model.save('embedding', save_optimizer=True)}")


if __name__ == "__main__":
    train()
