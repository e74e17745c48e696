"""Asks a model at a server, with or without what was trained.

TWINKLE_SERVER_URL=http://localhost:8000 ADAPTER_URI=twinkle://<run>/weights/last python sample.py
"""

import os

from twinkle import get_logger
from twinkle_client import init_twinkle_client
from twinkle_client.sampler import vLLMSampler

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
ADAPTER_URI = os.environ.get("ADAPTER_URI", "")
QUESTION = os.environ.get("QUESTION", "Who are you?")
NUM_SAMPLES = int(os.environ.get("NUM_SAMPLES", "2"))
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", "128"))

logger = get_logger()


def sample() -> None:
    """Draw some answers and show them."""
    init_twinkle_client()
    sampler = vLLMSampler(model_id=MODEL_ID)
    sampler.set_template("Qwen3_5Template", model_id=MODEL_ID)
    conversation = {"messages": [{"role": "user", "content": QUESTION}]}
    params = {"max_tokens": MAX_NEW_TOKENS, "num_samples": NUM_SAMPLES, "temperature": 0.7}
    (response,) = sampler.sample([conversation], sampling_params=params, adapter_uri=ADAPTER_URI or None)
    for number, sequence in enumerate(response.sequences):
        logger.info(f"Answer {number} ({sequence.stop_reason}): {sequence.decoded}")


if __name__ == "__main__":
    sample()
