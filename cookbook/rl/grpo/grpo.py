"""Lets a model answer problems of arithmetic and learn from what was right (GRPO), on two groups of devices.

    MODEL_GPUS=4 SAMPLER_GPUS=4 python grpo.py

One group trains, the other samples; before each batch the sampler gets the adapter as it is now. Ray places the groups
on this machine, or on the cluster that RAY_ADDRESS names. Without GPUs they are processes on the CPU.
"""

import os
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle import model as models
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.metric import CompletionRewardMetric
from twinkle.preprocessor import GSM8KProcessor
from twinkle.processor import InputProcessor
from twinkle.reward import GSM8KAccuracyReward
from twinkle.sampler import vLLMSampler

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
DATASET_ID = os.environ.get("DATASET_ID", "ms://modelscope/gsm8k")
USE_MEGATRON = os.environ.get("USE_MEGATRON", "0") == "1"
MODEL_GPUS = int(os.environ.get("MODEL_GPUS", "4"))
SAMPLER_GPUS = int(os.environ.get("SAMPLER_GPUS", "4"))
NUM_ROWS = int(os.environ.get("NUM_ROWS", "2000"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
"""Problems; each is answered NUM_GENERATIONS times."""
NUM_GENERATIONS = int(os.environ.get("NUM_GENERATIONS", "8"))
MINI_BATCH_SIZE = int(os.environ.get("MINI_BATCH_SIZE", "16"))
"""Answers of one step of the optimizer."""
MICRO_BATCH_SIZE = int(os.environ.get("MICRO_BATCH_SIZE", "2"))
"""Answers that go through the model at once, on each rank."""
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", "1024"))
MAX_STEPS = int(os.environ.get("MAX_STEPS", "200"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-5"))
BREVITY = float(os.environ.get("BREVITY", "0.2"))
"""What an answer without a token would earn beyond being right."""
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/grpo")

logger = get_logger()


def load_prompts() -> Dataset:
    """Problems with their solutions beside them. It runs on the group of the model, where rows are encoded."""
    dataset = Dataset(DatasetMeta(DATASET_ID, subset_name="main", data_slice=range(NUM_ROWS)))
    dataset.set_template("Qwen3_5Template", model_id=MODEL_ID, max_length=2048)
    dataset.map(GSM8KProcessor(system="Answer with \\boxed{}. Be brief."))
    dataset.encode(add_generation_prompt=True)
    return dataset


def make_model() -> Any:
    """What trains: every rank has the whole model and its share of the answers."""
    mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS)
    make = models.MegatronModel if USE_MEGATRON else models.TransformersModel
    model = make(model_id=MODEL_ID, device_mesh=mesh, remote_group="model")
    model.add_adapter_to_model("default", LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"))
    model.set_optimizer("default" if USE_MEGATRON else "AdamW", lr=LEARNING_RATE)
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_processor(InputProcessor)
    model.set_template("Qwen3_5Template", model_id=MODEL_ID)
    return model


def make_sampler() -> vLLMSampler:
    """What answers: every rank has the whole model and its share of the problems."""
    sampler = vLLMSampler(
        model_id=MODEL_ID,
        engine_args={"gpu_memory_utilization": 0.8, "max_model_len": 2048 + MAX_NEW_TOKENS, "max_lora_rank": 32},
        device_mesh=DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS),
        remote_group="sampler",
    )
    sampler.set_template("Qwen3_5Template", model_id=MODEL_ID)
    return sampler


def rewards_of(rows: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[float]:
    """One number an answer: right or not, and a little for being short."""
    right = GSM8KAccuracyReward()(rows)
    return [reward + BREVITY * (1 - length / MAX_NEW_TOKENS) for reward, length in zip(right, lengths, strict=True)]


def train() -> None:
    """Sample, reward, learn, again."""
    groups = [
        DeviceGroup(name="model", ranks=list(range(MODEL_GPUS)), device_type="GPU"),
        DeviceGroup(name="sampler", ranks=list(range(MODEL_GPUS, MODEL_GPUS + SAMPLER_GPUS)), device_type="GPU"),
    ]
    twinkle.initialize(mode="ray", groups=groups, lazy_collect=False)
    model, sampler = make_model(), make_sampler()
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    dataloader = DataLoader(
        dataset=load_prompts,
        batch_size=BATCH_SIZE,
        min_batch_size=BATCH_SIZE,
        device_mesh=DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS),
        remote_group="model",
    )
    advantage, metrics = GRPOAdvantage(), CompletionRewardMetric()
    params = SamplingParams(max_tokens=MAX_NEW_TOKENS, num_samples=NUM_GENERATIONS, logprobs=1)
    logger.info(get_device_placement())
    step = 0
    for batch in dataloader:
        version = manager.sync_weights(merge_and_sync=False)
        sequences = [one for response in sampler.sample(batch, params) for one in response.sequences]
        rows, lengths = [one.new_input_feature for one in sequences], [len(one.tokens) for one in sequences]
        old_logps = [[logprob[0][1] for logprob in one.logprobs] for one in sequences]
        rewards = rewards_of(rows, lengths)
        advantages = advantage(rewards, num_generations=NUM_GENERATIONS).tolist()
        metrics.reset()
        metrics.accumulate(None, None, rewards={"total": rewards}, completion_lengths=lengths)
        for start in range(0, len(rows), MINI_BATCH_SIZE):
            part = slice(start, start + MINI_BATCH_SIZE)
            model.forward_backward(
                inputs=rows[part],
                old_logps=old_logps[part],
                advantages=advantages[part],
                micro_batch_size=MICRO_BATCH_SIZE,
            )
            model.clip_grad_and_step()
            step += 1
            told = {"weights": version, **metrics.calculate(), **model.calculate_metric(is_training=True)}
            logger.info(f"Current is step {step} of {MAX_STEPS}, metric: {told}")
            if step == MAX_STEPS:
                break
        if step == MAX_STEPS:
            break
    logger.info(f"Saved to {model.save('last-checkpoint', output_dir=OUTPUT_DIR)}")


if __name__ == "__main__":
    train()
