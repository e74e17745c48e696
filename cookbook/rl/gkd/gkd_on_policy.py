"""Teaches a student to answer as a teacher would, on what the student itself says (GKD, arXiv 2306.13649).

    MODEL_GPUS=4 SAMPLER_GPUS=2 TEACHER_GPUS=2 python gkd_on_policy.py

Three groups: one trains the student, one answers with its weights of now, one has the teacher, which only scores.
"""

import os
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import GSM8KProcessor
from twinkle.sampler import vLLMSampler

STUDENT_ID = os.environ.get("STUDENT_MODEL_ID", "ms://Qwen/Qwen3-4B")
TEACHER_ID = os.environ.get("TEACHER_MODEL_ID", "ms://Qwen/Qwen3-30B-A3B-Instruct-2507")
"""Of the same vocabulary as the student."""
DATASET_ID = os.environ.get("DATASET_ID", "ms://modelscope/gsm8k")
MODEL_GPUS = int(os.environ.get("MODEL_GPUS", "4"))
SAMPLER_GPUS = int(os.environ.get("SAMPLER_GPUS", "2"))
TEACHER_GPUS = int(os.environ.get("TEACHER_GPUS", "2"))
NUM_ROWS = int(os.environ.get("NUM_ROWS", "2000"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", "1024"))
MAX_STEPS = int(os.environ.get("MAX_STEPS", "200"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-4"))
BETA = float(os.environ.get("GKD_BETA", "0.5"))
TEMPERATURE = float(os.environ.get("GKD_TEMPERATURE", "1.0"))
TOPK = int(os.environ.get("GKD_TOPK", "20"))
"""Tokens of the teacher that are compared at each place; its whole vocabulary would not fit a network."""
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/gkd_on_policy")

logger = get_logger()


def load_prompts() -> Dataset:
    """Problems alone: the answers are the student's."""
    dataset = Dataset(DatasetMeta(DATASET_ID, subset_name="main", data_slice=range(NUM_ROWS)))
    dataset.set_template("Template", model_id=STUDENT_ID, max_length=2048)
    dataset.map(GSM8KProcessor())
    dataset.encode(add_generation_prompt=True)
    return dataset


def device_groups() -> list[DeviceGroup]:
    """Three groups, one after the other."""
    ends = [MODEL_GPUS, MODEL_GPUS + SAMPLER_GPUS, MODEL_GPUS + SAMPLER_GPUS + TEACHER_GPUS]
    starts = [0, *ends]
    return [
        DeviceGroup(name=name, ranks=list(range(start, end)), device_type="GPU")
        for name, start, end in zip(("model", "sampler", "teacher"), starts, ends, strict=False)
    ]


def make_sampler(model_id: str, group: str, size: int) -> vLLMSampler:
    """A model on a group, every rank with the whole of it."""
    return vLLMSampler(
        model_id=model_id,
        engine_args={"max_model_len": 2048 + MAX_NEW_TOKENS, "max_logprobs": TOPK},
        device_mesh=DeviceMesh.from_sizes(world_size=size, dp_size=size),
        remote_group=group,
    )


def targets_of(scores: Sequence[SampleResponse]) -> dict[str, list[Any]]:
    """The teacher's likeliest tokens at each place of each row; as labels do, they stand a place before."""
    nothing = [(0, 0.0)] * TOPK
    rows = [[*(place or nothing for place in score.topk_prompt_logprobs[1:]), nothing] for score in scores]
    return {
        "teacher_topk_indices": [[[token for token, _ in place] for place in row] for row in rows],
        "teacher_topk_logprobs": [[[logprob for _, logprob in place] for place in row] for row in rows],
    }


def train() -> None:
    """Answer, let the teacher score it, learn, again."""
    twinkle.initialize(mode="ray", groups=device_groups(), lazy_collect=False)
    mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS)
    student = TransformersModel(model_id=STUDENT_ID, device_mesh=mesh, remote_group="model")
    student.add_adapter_to_model("default", LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    student.set_loss("GKDLoss", beta=BETA, temperature=TEMPERATURE)
    student.set_optimizer("AdamW", lr=LEARNING_RATE)
    sampler = make_sampler(STUDENT_ID, "sampler", SAMPLER_GPUS)
    sampler.set_template("Template", model_id=STUDENT_ID)
    teacher = make_sampler(TEACHER_ID, "teacher", TEACHER_GPUS)
    manager = CheckpointEngineManager(model=student, sampler=sampler)
    dataloader = DataLoader(
        dataset=load_prompts, batch_size=BATCH_SIZE, min_batch_size=BATCH_SIZE, device_mesh=mesh, remote_group="model"
    )
    logger.info(get_device_placement())
    for step, batch in enumerate(dataloader):
        if step == MAX_STEPS:
            break
        manager.sync_weights(merge_and_sync=False)
        answers = sampler.sample(batch, SamplingParams(max_tokens=MAX_NEW_TOKENS, num_samples=1))
        rows = [answer.sequences[0].new_input_feature for answer in answers]
        scores = teacher.sample(
            [{"input_ids": row["input_ids"]} for row in rows], SamplingParams(max_tokens=0, prompt_logprobs=TOPK)
        )
        student.forward_backward(inputs=rows, **targets_of(scores))
        student.clip_grad_and_step()
        metric = student.calculate_metric(is_training=True)
        logger.info(f"Current is step {step} of {MAX_STEPS}, metric: {dict(metric)}")
    logger.info(f"Saved to {student.save('last-checkpoint', output_dir=OUTPUT_DIR)}")


if __name__ == "__main__":
    train()
