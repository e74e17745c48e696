"""Recipes of the Tinker cookbook, unmodified, against a whole service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from harness.cookbook import (
    CONVERSATIONS,
    SL_LOOP_ARGUMENTS,
    cookbook_python,
    make_offline_data,
    read_chats,
    read_metrics,
    read_rows,
    run_recipe,
    write_rows,
)
from harness.served import Served

# A name that the cookbook has a renderer for; the model behind it is the tiny one.
MODEL_NAME = "Qwen/Qwen3-8B"

NUM_LESSONS = 40
# What the sampler says of its own tokens and what the trainer says of them, per token, both in float32.
SAMPLER_TOLERANCE = 1e-5

Recipe = Callable[..., list[dict[str, float]]]

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served_as_qwen(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    cookbook_python()
    home = tmp_path_factory.mktemp("cookbook") / "home"
    with Served(home, model=str(tiny_model), model_name=MODEL_NAME) as served:
        yield served


@pytest.fixture(scope="module")
def key(served_as_qwen: Served) -> str:
    return served_as_qwen.create_key("cookbook")


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return make_offline_data(tmp_path_factory.mktemp("offline"), model_name=MODEL_NAME, tokenizer_folder=tiny_model)


@pytest.fixture(scope="module")
def five_or_six(served_as_qwen: Served, key: str, tiny_model: Path) -> str:
    """A checkpoint of an adapter that answers 5 or 6 to everything, so that a group's rewards differ."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    client = tinker.ServiceClient(base_url=served_as_qwen.url, api_key=key)
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
def recipe(served_as_qwen: Served, key: str, offline: Path, tmp_path: Path) -> Recipe:
    """Runs one recipe to its end and returns what it logged, a dictionary a step."""

    def run(name: str, *arguments: str) -> list[dict[str, float]]:
        everywhere = [f"model_name={MODEL_NAME}", f"log_path={tmp_path / 'log'}"]
        done = run_recipe(name, [*everywhere, *arguments], base_url=served_as_qwen.url, api_key=key, cwd=offline)
        assert done.returncode == 0, done.stdout
        return read_metrics(tmp_path / "log")

    return run


def column(steps: list[dict[str, float]], name: str) -> list[float]:
    return [step[name] for step in steps if name in step]


def test_sl_loop_trains_saves_and_resumes(served_as_qwen: Served, tiny_model: Path, tmp_path: Path) -> None:
    cwd = make_offline_data(tmp_path, model_name=MODEL_NAME, tokenizer_folder=tiny_model)
    key = served_as_qwen.create_key("cookbook")
    arguments = [*SL_LOOP_ARGUMENTS, f"model_name={MODEL_NAME}", f"log_path={tmp_path / 'log'}"]

    first = run_recipe("sl_loop", arguments, base_url=served_as_qwen.url, api_key=key, cwd=cwd)
    again = run_recipe("sl_loop", arguments, base_url=served_as_qwen.url, api_key=key, cwd=cwd)

    assert first.returncode == 0, first.stdout
    assert again.returncode == 0, again.stdout
    losses = [step["train_mean_nll"] for step in read_metrics(tmp_path / "log") if "train_mean_nll" in step]
    assert losses[0] > losses[2]
    saved = served_as_qwen.query("SELECT kind, name FROM checkpoint WHERE listed ORDER BY kind, name")
    assert ("training", "final") in saved
    assert ("sampler", "final") in saved


def test_rl_loop_resumes_samples_groups_and_trains_on_their_rewards(
    recipe: Recipe, five_or_six: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "log" / "checkpoints.jsonl", [{"name": "taught", "batch": 0, "state_path": five_or_six}])

    steps = recipe("rl_loop", "batch_size=4", "group_size=8", "max_tokens=24", "save_every=1", "max_steps=2")

    # The first question's answer is 5, so some of its group are right and some are not.
    assert 0 < column(steps, "reward/total")[0] < 1
    assert column(steps, "grad_norm")[0] > 0


@pytest.mark.soak
@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop_trains_with_every_loss_it_offers(recipe: Recipe, five_or_six: str, tmp_path: Path, loss: str) -> None:
    write_rows(tmp_path / "log" / "checkpoints.jsonl", [{"name": "taught", "batch": 0, "state_path": five_or_six}])

    steps = recipe("rl_loop", "batch_size=4", "group_size=8", "max_tokens=24", "max_steps=1", f"loss_fn={loss}")

    assert column(steps, "grad_norm")[0] > 0


@pytest.mark.soak
@pytest.mark.parametrize("way", [(), ("max_steps_off_policy=2",)], ids=["in step", "off policy"])
def test_math_rl_steps_to_its_end_and_agrees_with_its_sampler(
    recipe: Recipe, five_or_six: str, way: tuple[str, ...]
) -> None:
    steps = recipe(
        "math_rl.train",
        "env=arithmetic",
        f"load_checkpoint_path={five_or_six}",
        *("lora_rank=8", "groups_per_batch=4", "group_size=4", "max_tokens=24", "save_every=1", "max_steps=3"),
        *way,
    )

    assert len(column(steps, "env/all/reward/total")) == 3
    assert column(steps, "env/all/format")[0] > 0.5
    # The first step is on policy either way.
    assert abs(column(steps, "optim/kl_sample_train_v1")[0]) < SAMPLER_TOLERANCE


@pytest.mark.soak
def test_chat_sl_learns_and_rolls_its_checkpoints(recipe: Recipe, served_as_qwen: Served, tmp_path: Path) -> None:
    arguments = (f"dataset={CONVERSATIONS}", "lora_rank=8", "batch_size=8", "learning_rate=1e-3", "max_steps=6")

    steps = recipe("chat_sl.train", *arguments, "rolling_save_every=1", "save_every=3")

    losses = column(steps, "train_mean_nll")
    assert losses[-1] < losses[0]
    (final,) = (row for row in read_rows(tmp_path / "log" / "checkpoints.jsonl") if row["name"] == "final")
    saved = served_as_qwen.query(
        "SELECT name FROM checkpoint WHERE listed AND path LIKE ?", final["state_path"].removesuffix("final") + "%"
    )
    assert sorted(saved) == [("000003",), ("final",)]


@pytest.mark.soak
def test_dpo_comes_to_prefer_what_was_chosen(recipe: Recipe) -> None:
    steps = recipe("preference.dpo.train", "renderer_name=qwen3", "batch_size=8", "learning_rate=1e-3", "max_steps=4")

    # With the reference's own weights there is nothing to choose.
    assert column(steps, "dpo_loss")[0] == pytest.approx(0.693147, abs=1e-4)
    assert column(steps, "dpo_loss")[-1] < 0.6
    assert column(steps, "margin")[-1] > 0


@pytest.mark.soak
def test_guess_number_plays_turn_by_turn(recipe: Recipe) -> None:
    # The recipe evaluates on four hundred games unless it is told not to.
    arguments = ("batch_size=2", "group_size=2", "max_tokens=8", "max_steps=2", "save_every=1", "eval_every=0")

    steps = recipe("multiplayer_rl.guess_number.train", "renderer_name=qwen3_disable_thinking", *arguments)

    assert column(steps, "env/all/turns_per_episode") == [10.0, 10.0]
    assert column(steps, "env/all/reward/total") == [-10.0, -10.0]


@pytest.mark.soak
def test_shorter_compares_replies_in_pairs(recipe: Recipe) -> None:
    arguments = ("batch_size=2", "group_size=4", "max_tokens=8", "max_steps=2", "learning_rate=1e-3")

    steps = recipe("preference.shorter.train", "renderer_name=qwen3_disable_thinking", *arguments)

    assert column(steps, "env/all/by_group/frac_mixed")[0] > 0
    assert column(steps, "grad_norm")[0] > 0
    assert abs(column(steps, "optim/kl_sample_train_v1")[0]) < SAMPLER_TOLERANCE
    assert column(steps, "kl_pre_post_v2")[0] > 0
