"""Runs recipes of the Tinker cookbook, unmodified and offline, against a service of ours.

The cookbook gets a virtual environment of its own, laid over the one that runs this: what it needs beyond it (data
sets, renderers) is nothing the project wants. Its working directory holds everything it would download, under the name
it asks for.

    PYTHONPATH=tests python -m harness.cookbook URL MODEL_NAME TOKENIZER_FOLDER [RECIPE [ARGUMENT ...]]

runs one recipe (`sl_loop` if none is given) by hand; the key is taken from TINKER_API_KEY.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.environment import overlaid_python

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("cookbook-requirements.txt")
CACHE = REPOSITORY / ".cache" / "cookbook-venv"
RECIPE_TIMEOUT_S = 150.0

# A name that the cookbook has a renderer for; the model behind it is a tiny one.
MODEL_NAME = "Qwen/Qwen3-8B"

NO_ROBOTS = "HuggingFaceH4/no_robots"
GSM8K = "openai/gsm8k"
HH_RLHF = "Anthropic/hh-rlhf"
DEEPMATH = "zwhe99/DeepMath-103K"
TOOLALPACA = "tangqiaoyu/ToolAlpaca"
CONVERSATIONS = "conversations.jsonl"
# The cookbook's own smoke tests want at least 1,300 rows.
NUM_TRAIN_ROWS = 1400
# `sl_basic` evaluates whole batches of 128.
NUM_TEST_ROWS = 128

# The recipe asks for this configuration by name, which a folder has only when its card names it.
GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""

SL_LOOP_ARGUMENTS = ("batch_size=8", "max_steps=3", "save_every=2", "lora_rank=8")


def cookbook_python(cache: Path = CACHE) -> Path:
    """Returns the Python of the cookbook's environment; makes it first (half a minute) when there is none."""
    return overlaid_python(cache, install=("-r", REQUIREMENTS), made_from=REQUIREMENTS.read_text())


def make_offline_data(folder: Path, *, model_name: str, tokenizer_folder: Path) -> Path:
    """Fills `folder` with what recipes would download, under the relative names they use; returns it.

    Args:
        folder: The working directory of the recipes to come.
        model_name: The served name, one that the cookbook knows, such as `Qwen/Qwen3-8B`.
        tokenizer_folder: A model folder; everything but its weights is copied.
    """
    shutil.copytree(
        tokenizer_folder, folder / model_name, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    identity, arithmetic = (read_chats(f"{name}.jsonl") for name in ("self_cognition", "arithmetic"))
    chats = [*identity, *arithmetic]
    for split, num_rows in (("train", NUM_TRAIN_ROWS), ("test", NUM_TEST_ROWS)):
        rows = [
            {"prompt_id": f"{split}-{index}", "category": "Chat", "messages": chats[index % len(chats)]}
            for index in range(num_rows)
        ]
        write_rows(folder / NO_ROBOTS / f"{split}.jsonl", rows)
        write_rows(folder / GSM8K / "main" / f"{split}.jsonl", [as_problem(chat) for chat in arithmetic])
        write_rows(folder / HH_RLHF / f"{split}.jsonl", [as_comparison(chat) for chat in identity])
    write_rows(folder / DEEPMATH / "train.jsonl", [as_short_problem(chat) for chat in arithmetic])
    write_rows(folder / TOOLALPACA / "train.jsonl", [as_instruction(chat) for chat in arithmetic])
    (folder / GSM8K / "README.md").write_text(GSM8K_CARD, encoding="utf-8")
    write_rows(folder / CONVERSATIONS, [{"messages": chat} for chat in chats])
    return folder


def read_chats(name: str) -> list[list[dict[str, str]]]:
    """Returns the chats of one of the shipped files, each a list of messages."""
    return [row["messages"] for row in read_rows(REPOSITORY / "examples" / "data" / name)]


def as_problem(chat: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns a question of arithmetic with its worked answer, in the layout of GSM8K."""
    question, answer = chat[0]["content"], chat[1]["content"]
    return {"question": question, "answer": f"{answer}\n#### {answer.split()[-1].rstrip('.')}"}


def as_short_problem(chat: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns a question of arithmetic with its answer alone, in the layout of DeepMath."""
    return {"question": chat[0]["content"], "final_answer": chat[1]["content"].split()[-1].rstrip(".")}


def as_instruction(chat: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns a question with the reply to demonstrate, in the layout of ToolAlpaca."""
    return {"instruction": chat[0]["content"], "output": chat[1]["content"]}


def as_comparison(chat: Sequence[dict[str, str]]) -> dict[str, str]:
    """Returns the chat's reply preferred to a reply that says nothing, in the layout of HH-RLHF."""
    asked = f"\n\nHuman: {chat[-2]['content']}\n\nAssistant: "
    return {"chosen": f"{asked}{chat[-1]['content']}", "rejected": f"{asked}Who knows?"}


def write_rows(path: Path, rows: Sequence[object]) -> None:
    """Writes JSON Lines, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_recipe(
    name: str, args: Sequence[str], *, base_url: str, api_key: str, cwd: Path, timeout_s: float = RECIPE_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m tinker_cookbook.recipes.<name> <args>` in `cwd` and returns how it ended, with its output.

    Args:
        name: The recipe's module, such as `sl_loop` or `chat_sl.train`.
        args: Its command line; without `log_path=` it logs under `cwd`.
        base_url: The service.
        api_key: A tenant's key.
        cwd: A folder filled by `make_offline_data`.
        timeout_s: After this the recipe is killed and `subprocess.TimeoutExpired` raised.
    """
    # Only what a recipe needs: nothing of the caller's keys, proxies or Python paths.
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    environment |= {
        "TINKER_BASE_URL": base_url,
        "TINKER_API_KEY": api_key,
        "TINKER_COOKBOOK_RUNS_DIR": str(cwd / "runs"),
        "HOME": str(cwd),
        "HF_HOME": str(cwd / "hf-home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.run(
        [cookbook_python(), "-m", f"tinker_cookbook.recipes.{name}", *args],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def read_metrics(log_path: Path) -> list[dict[str, float]]:
    """Returns what a recipe logged, one dictionary a step."""
    return read_rows(log_path / "metrics.jsonl")


def column(steps: Sequence[dict[str, float]], name: str) -> list[float]:
    """Returns what was logged under a name, of the steps that logged it."""
    return [step[name] for step in steps if name in step]


def main(arguments: Sequence[str]) -> int:
    """Runs one recipe by hand; returns its exit code."""
    base_url, model_name, tokenizer_folder, *rest = arguments
    name, args = (rest[0], rest[1:]) if rest else ("sl_loop", [*SL_LOOP_ARGUMENTS, f"model_name={model_name}"])
    with tempfile.TemporaryDirectory(prefix="cookbook-") as scratch:
        cwd = make_offline_data(Path(scratch), model_name=model_name, tokenizer_folder=Path(tokenizer_folder))
        done = run_recipe(name, args, base_url=base_url, api_key=os.environ["TINKER_API_KEY"], cwd=cwd)
    print(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
