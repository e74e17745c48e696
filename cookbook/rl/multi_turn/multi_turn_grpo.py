"""Lets a model guess a number in several turns, and learn from how near it came (GRPO over whole conversations).

    MODEL_GPUS=4 SAMPLER_GPUS=4 python multi_turn_grpo.py

The environment is below; one of OpenEnv (`twinkle_agentic.envs.OpenEnv`) takes its place in one line.
"""

import os
import random
from typing import Any

from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.model import TransformersModel
from twinkle.sampler import vLLMSampler
from twinkle.template import Qwen3_5Template
from twinkle_agentic.envs import Env, EnvPool, EnvTool, StepResult
from twinkle_agentic.rollout import MultiTurnRollout
from twinkle_agentic.tools import ToolManager

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
MODEL_GPUS = int(os.environ.get("MODEL_GPUS", "4"))
SAMPLER_GPUS = int(os.environ.get("SAMPLER_GPUS", "4"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "4"))
"""Numbers to guess; each is played NUM_GENERATIONS times."""
NUM_GENERATIONS = int(os.environ.get("NUM_GENERATIONS", "8"))
MAX_TURNS = int(os.environ.get("MAX_TURNS", "6"))
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", "256"))
MAX_LENGTH = int(os.environ.get("MAX_LENGTH", "4096"))
"""Tokens of a whole conversation."""
MICRO_BATCH_SIZE = int(os.environ.get("MICRO_BATCH_SIZE", "2"))
MAX_STEPS = int(os.environ.get("MAX_STEPS", "100"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-5"))
OUTPUT_DIR = os.environ.get("OUTPUT_DIR", "output/multi_turn_grpo")
LARGEST = 100

logger = get_logger()


class GuessNumber(Env):
    """A number up to LARGEST. A guess is told whether it is too high or too low, and earns more the nearer it is."""

    def reset(self, trajectory: Any = None) -> StepResult:
        """Take the number that the trajectory brings."""
        self.number = dict((trajectory or {}).get("user_data") or ())["number"]
        return StepResult(observation=f"Guess my number from 1 to {LARGEST}.")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """One guess."""
        try:
            guess = int(arguments["number"])
        except (KeyError, TypeError, ValueError):
            return StepResult(observation="Send a whole number.", reward=0.0)
        if guess == self.number:
            return StepResult(observation="That is it.", reward=1.0, done=True)
        distance = min(1.0, abs(guess - self.number) / LARGEST)
        return StepResult(observation="Too high." if guess > self.number else "Too low.", reward=0.2 * (1 - distance))

    def tools(self) -> list[Any]:
        """One action."""
        number = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
        function = {"name": "guess", "description": "Guess the number.", "parameters": number}
        return [{"type": "function", "function": function}]


def play(rollout: MultiTurnRollout, pool: EnvPool, numbers: list[int]) -> tuple[list[dict[str, Any]], list[float]]:
    """A conversation for each number, all of them at once; with what each has earned."""
    adapters = pool.get_adapters(len(numbers))
    trajectories = []
    for env, number in zip(adapters, numbers, strict=True):
        start = env.reset({"messages": [], "user_data": [("number", number)]})
        messages = [{"role": "user", "content": start.observation}]
        trajectories.append({"messages": messages, "tools": env.tools(), "user_data": [("number", number)]})
    tools = [EnvTool.from_env(env) for env in adapters]
    rows = rollout(trajectories, tool_manager=[ToolManager(each) for each in tools])
    # A guess that came late is worth less.
    earned = [sum(tool.episode_reward for tool in each) for each in tools]
    return rows, [reward / max(1, row["turns"]) for reward, row in zip(earned, rows, strict=True)]


def train() -> None:
    """Play, learn, again."""
    groups = [
        DeviceGroup(name="model", ranks=list(range(MODEL_GPUS)), device_type="GPU"),
        DeviceGroup(name="sampler", ranks=list(range(MODEL_GPUS, MODEL_GPUS + SAMPLER_GPUS)), device_type="GPU"),
    ]
    twinkle.initialize(mode="ray", groups=groups, lazy_collect=False)
    mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS)
    model = TransformersModel(model_id=MODEL_ID, device_mesh=mesh, remote_group="model")
    model.add_adapter_to_model("default", LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    model.set_loss("GRPOLoss", epsilon=0.2)
    sampler = vLLMSampler(
        model_id=MODEL_ID,
        engine_args={"max_model_len": MAX_LENGTH},
        device_mesh=DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS),
        remote_group="sampler",
    )
    sampler.set_template("Qwen3_5Template", model_id=MODEL_ID)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    template = Qwen3_5Template(MODEL_ID, max_length=MAX_LENGTH)
    rollout = MultiTurnRollout(
        sampler, template, sampling_params=SamplingParams(max_tokens=MAX_NEW_TOKENS, logprobs=1), max_turns=MAX_TURNS
    )
    pool = EnvPool(BATCH_SIZE * NUM_GENERATIONS, GuessNumber)
    advantage, draw = GRPOAdvantage(), random.Random(0)
    logger.info(get_device_placement())
    for step in range(MAX_STEPS):
        version = manager.sync_weights(merge_and_sync=False)
        numbers = [draw.randint(1, LARGEST) for _ in range(BATCH_SIZE)]
        rows, rewards = play(rollout, pool, [number for number in numbers for _ in range(NUM_GENERATIONS)])
        model.forward_backward(
            inputs=rows,
            old_logps=[[logprob[0][1] for logprob in row["logprobs"]] for row in rows],
            advantages=advantage(rewards, num_generations=NUM_GENERATIONS).tolist(),
            micro_batch_size=MICRO_BATCH_SIZE,
        )
        model.clip_grad_and_step()
        turns = sum(row["turns"] for row in rows) / len(rows)
        told = {"weights": version, "reward": sum(rewards) / len(rows), "turns": turns}
        logger.info(f"Current is step {step} of {MAX_STEPS}, metric: {told | model.calculate_metric(is_training=True)}")
    logger.info(f"Saved to {model.save('last-checkpoint', output_dir=OUTPUT_DIR)}")


if __name__ == "__main__":
    train()
