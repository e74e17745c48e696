"""Lets a model at a server answer problems of arithmetic, and rewards what is right and short (GRPO).

    TWINKLE_SERVER_URL=http://localhost:8000 TWINKLE_SERVER_TOKEN=tml-... python short_math_grpo.py

Sampling and training use one server and one base model; what was learned reaches the sampler as a checkpoint's path.
"""

import os
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig

from twinkle import get_logger
from twinkle.advantage import GRPOAdvantage
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.metric import CompletionRewardMetric
from twinkle.preprocessor import GSM8KProcessor
from twinkle.reward import GSM8KAccuracyReward
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import vLLMSampler

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://modelscope/gsm8k")
NUM_ROWS = int(os.environ.get("NUM_ROWS", "2000"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "2"))
NUM_GENERATIONS = int(os.environ.get("NUM_GENERATIONS", "4"))
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", "1024"))
MAX_STEPS = int(os.environ.get("MAX_STEPS", "100"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-5"))
BREVITY = float(os.environ.get("BREVITY", "0.2"))
"""What an answer without a token would earn beyond being right."""

logger = get_logger()


def load_prompts() -> DataLoader:
    """Problems with their solutions beside them."""
    dataset = Dataset(DatasetMeta(DATASET_ID, subset_name="main", data_slice=range(NUM_ROWS)))
    dataset.set_template("Qwen3_5Template", model_id=MODEL_ID, max_length=2048)
    dataset.map(GSM8KProcessor(system="Answer with \\boxed{}. Be brief."))
    dataset.encode(add_generation_prompt=True)
    return DataLoader(dataset=dataset, batch_size=BATCH_SIZE)


def rewards_of(rows: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[float]:
    """One number an answer: right or not, and a little for being short."""
    right = GSM8KAccuracyReward()(rows)
    return [reward + BREVITY * (1 - length / MAX_NEW_TOKENS) for reward, length in zip(right, lengths, strict=True)]


def train() -> None:
    """Sample, reward, learn, again."""
    init_twinkle_client()
    dataloader = load_prompts()
    model = MultiLoraTransformersModel(model_id=MODEL_ID)
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    sampler = vLLMSampler(model_id=MODEL_ID)
    advantage, metrics = GRPOAdvantage(), CompletionRewardMetric()
    params = {
        "max_tokens": MAX_NEW_TOKENS,
        "num_samples": NUM_GENERATIONS,
        "logprobs": 1,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    for step, batch in enumerate(dataloader):
        if step == MAX_STEPS:
            break
        path = model.save("for-the-sampler", is_sampler=True)
        responses = sampler.sample(batch, sampling_params=params, adapter_uri=path)
        sequences = [sequence for response in responses for sequence in response.sequences]
        rows, lengths = [one.new_input_feature for one in sequences], [len(one.tokens) for one in sequences]
        rewards = rewards_of(rows, lengths)
        advantages = advantage(rewards, num_generations=NUM_GENERATIONS).tolist()
        model.forward_backward(inputs=rows, advantages=advantages, old_logps=[one.logprobs for one in sequences])
        model.clip_grad_and_step()
        metrics.reset()
        metrics.accumulate(None, None, rewards={"total": rewards}, completion_lengths=lengths)
        logger.info(f"Step {step}: {metrics.calculate() | dict(model.calculate_metric(is_training=True).result)}")
    logger.info(f"Saved to {model.save('short-math', save_optimizer=True)}")


if __name__ == "__main__":
    train()
