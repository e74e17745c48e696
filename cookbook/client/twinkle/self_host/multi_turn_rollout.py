"""Lets a model at a server play Blackjack in several turns, and learn from what it wins (GRPO over conversations).

    TWINKLE_SERVER_URL=http://localhost:8000 TWINKLE_SERVER_TOKEN=tml-... python multi_turn_rollout.py

The game is played here, only sampling and training are the server's. An environment of OpenEnv
(`twinkle_agentic.envs.OpenEnv`) takes the game's place in one line.
"""

import os
import random
from typing import Any

from peft import LoraConfig

from twinkle import get_logger
from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import SamplingParams
from twinkle.template import Qwen3_5Template
from twinkle_agentic.envs import Env, EnvTool, StepResult
from twinkle_agentic.tools import ToolManager
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.rollout import ClientMultiTurnRollout
from twinkle_client.sampler import vLLMSampler

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen3.5-4B")
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "2"))
"""Deals; each is played NUM_GENERATIONS times."""
NUM_GENERATIONS = int(os.environ.get("NUM_GENERATIONS", "4"))
MAX_TURNS = int(os.environ.get("MAX_TURNS", "4"))
MAX_NEW_TOKENS = int(os.environ.get("MAX_NEW_TOKENS", "512"))
MAX_LENGTH = int(os.environ.get("MAX_LENGTH", "8192"))
"""Tokens of a whole conversation."""
MAX_STEPS = int(os.environ.get("MAX_STEPS", "100"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "1e-5"))
BRIEF = float(os.environ.get("BRIEF", "0.1"))
"""What a conversation without a word would earn beyond the game, and half of it one of a hundred characters."""

logger = get_logger()


class Blackjack(Env):
    """One hand against a dealer who draws up to 17. Cards count 1 to 10, from a deck without end."""

    def __init__(self, seed: int) -> None:
        self._deck = random.Random(seed)
        self._own, self._dealer = [self._card(), self._card()], [self._card()]

    def reset(self, trajectory: Any = None) -> StepResult:
        """The cards on the table."""
        return StepResult(observation=f"You hold {self._own}, the dealer shows {self._dealer[0]}. Hit or stand?")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """One more card, or the dealer's turn."""
        if arguments.get("action") == "hit":
            self._own.append(self._card())
            if sum(self._own) <= 21:
                return StepResult(observation=f"You hold {self._own}. Hit or stand?")
            return StepResult(observation=f"You hold {self._own}: bust.", reward=-1.0, done=True)
        while sum(self._dealer) < 17:
            self._dealer.append(self._card())
        won = sum(self._dealer) > 21 or sum(self._own) > sum(self._dealer)
        lost = not won and sum(self._own) < sum(self._dealer)
        return StepResult(observation=f"The dealer holds {self._dealer}.", reward=float(won) - float(lost), done=True)

    def tools(self) -> list[Any]:
        """One action."""
        action = {"type": "string", "enum": ["hit", "stand"]}
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        function = {"name": "play", "description": "Take a card or stand.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def _card(self) -> int:
        return min(10, self._deck.randint(1, 13))


def play(rollout: ClientMultiTurnRollout, deals: list[int], path: str) -> tuple[list[dict[str, Any]], list[float]]:
    """A conversation for each deal, all of them at once, by the checkpoint at ``path``; with what each has earned."""
    games = [Blackjack(deal) for deal in deals]
    tools = [EnvTool.from_env(game) for game in games]
    trajectories = [
        {"messages": [{"role": "user", "content": game.reset().observation}], "tools": game.tools()} for game in games
    ]
    rows = rollout(trajectories, tool_manager=[ToolManager(each) for each in tools], adapter_uri=path)
    said = [sum(len(one["content"]) for one in row["messages"] if one["role"] == "assistant") for row in rows]
    won = [sum(tool.episode_reward for tool in each) for each in tools]
    return rows, [reward + BRIEF / (1 + length / 100) for reward, length in zip(won, said, strict=True)]


def train() -> None:
    """Play, learn, again."""
    init_twinkle_client()
    model = MultiLoraTransformersModel(model_id=MODEL_ID)
    model.add_adapter_to_model("default", LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    sampler = vLLMSampler(model_id=MODEL_ID)
    sampler.set_template("Qwen3_5Template", model_id=MODEL_ID)
    template = Qwen3_5Template(MODEL_ID, max_length=MAX_LENGTH)
    params = SamplingParams(max_tokens=MAX_NEW_TOKENS, logprobs=1, temperature=1.0, top_p=0.95)
    rollout = ClientMultiTurnRollout(sampler, template, sampling_params=params, max_turns=MAX_TURNS)
    advantage = GRPOAdvantage()
    for step in range(MAX_STEPS):
        path = model.save("for-the-sampler", is_sampler=True)
        deals = [step * BATCH_SIZE + number for number in range(BATCH_SIZE) for _ in range(NUM_GENERATIONS)]
        rows, rewards = play(rollout, deals, path)
        model.forward_backward(
            inputs=rows,
            old_logps=[[logprob[0][1] for logprob in row["logprobs"]] for row in rows],
            advantages=advantage(rewards, num_generations=NUM_GENERATIONS).tolist(),
        )
        model.clip_grad_and_step()
        told = {"reward": sum(rewards) / len(rows), "turns": sum(row["turns"] for row in rows) / len(rows)}
        metrics = told | dict(model.calculate_metric(is_training=True).result)
        logger.info(f"Current is step {step} of {MAX_STEPS}, metric: {metrics}")
    logger.info(f"Saved to {model.save('multi-turn', save_optimizer=True)}")


if __name__ == "__main__":
    train()
