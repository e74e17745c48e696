"""One service for all recipes, what they would download, and a checkpoint that gives them something to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from harness.cookbook import (
    MODEL_NAME,
    RECIPE_TIMEOUT_S,
    cookbook_python,
    make_offline_data,
    read_chats,
    read_metrics,
    run_recipe,
)
from harness.leftovers import sdk_client
from harness.served import Served

NUM_LESSONS = 40

Recipe = Callable[..., list[dict[str, float]]]


@pytest.fixture(scope="package")
def served_as_qwen(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    cookbook_python()
    home = tmp_path_factory.mktemp("cookbook") / "home"
    # Recipes bring functions of their own as losses: those stay in the client, whatever this says.
    settings = {"TWINKLE_CUSTOM_LOSS_SERVER_SIDE": "true"}
    with Served(home, model=str(tiny_model), model_name=MODEL_NAME, **settings) as served:
        yield served


@pytest.fixture(scope="package")
def key(served_as_qwen: Served) -> str:
    return served_as_qwen.create_key("cookbook")


@pytest.fixture(scope="package")
def offline(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return make_offline_data(tmp_path_factory.mktemp("offline"), model_name=MODEL_NAME, tokenizer_folder=tiny_model)


@pytest.fixture(scope="package")
def five_or_six(served_as_qwen: Served, key: str, tiny_model: Path) -> str:
    """A checkpoint of an adapter that answers 5 or 6 to everything, so that a group's rewards differ."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    client = sdk_client(served_as_qwen.url, key)
    run = client.create_lora_training_client(base_model=MODEL_NAME, rank=8, seed=1).result()
    chats = read_chats("arithmetic.jsonl")
    # Questions asked at once and questions asked after long examples, as the recipes ask them.
    examples = [message for chat in chats[2:14] for message in chat]
    asked = [[*before, chat[0]] for before in ([], examples) for chat in chats[:2]]
    batch = [
        taught_turn(prompt, tokenizer.encode(f"\\boxed{{{digit}}}<|im_end|>"))
        for prompt in (tokenizer.encode(as_prompt(tokenizer, chat)) for chat in asked)
        for digit in (5, 6)
    ]
    passes = []
    for _ in range(NUM_LESSONS):
        passes.append(run.forward_backward(batch, "cross_entropy"))
        run.optim_step(tinker.AdamParams(learning_rate=1e-2))
    assert passes[-1].result().metrics["loss:sum"] < passes[0].result().metrics["loss:sum"] / 4
    return run.save_state("five-or-six").result().path


def as_prompt(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def taught_turn(prompt: list[int], reply: list[int]) -> tinker.Datum:
    tokens = prompt + reply
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply),
        },
    )


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    """Where the recipe logs, and finds what it resumes from."""
    return tmp_path / "log"


@pytest.fixture
def recipe(served_as_qwen: Served, key: str, offline: Path, log_path: Path) -> Recipe:
    """Runs one recipe to its end and returns what it has logged there, a dictionary a step."""

    def run(name: str, *arguments: str, timeout_s: float = RECIPE_TIMEOUT_S) -> list[dict[str, float]]:
        everywhere = [f"model_name={MODEL_NAME}", f"log_path={log_path}"]
        done = run_recipe(
            name,
            [*everywhere, *arguments],
            base_url=served_as_qwen.url,
            api_key=key,
            cwd=offline,
            timeout_s=timeout_s,
        )
        assert done.returncode == 0, done.stdout
        return read_metrics(log_path)

    return run
