"""``twinkle submit`` for what trains: the lines of the documents are specs that the server takes."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from twinkle.cli.jobs.options import LocalFile, Spec
from twinkle.cli.jobs.rl import distill_options, grpo_options
from twinkle.cli.jobs.submit import submit
from twinkle.cli.jobs.training import dpo_options, sft_options
from twinkle.core.errors import ConfigError
from twinkle.wire.bodies.jobs_rl import ReinforcementSpec
from twinkle.wire.bodies.jobs_specs import parse_spec
from twinkle.wire.bodies.jobs_training import PreferenceSpec, SupervisedSpec

ROOT = Path(__file__).parents[3]
OPTIONS: dict[str, Callable[..., Spec]] = {
    "sft": sft_options,
    "dpo": dpo_options,
    "grpo": grpo_options,
    "distill": distill_options,
}
LINES = [
    line
    for document in ("docs/jobs.md", "examples/data/README.md", "README.md")
    for line in re.findall(r"^twinkle submit (?:sft|dpo|grpo|distill) .*$", (ROOT / document).read_text(), re.MULTILINE)
]


GRADER = {"type": "reward", "name": "sum", "reward": "arithmetic", "reference": "{{item.answer}}"}


def spec_of(line: str) -> tuple[str, dict[str, Any]]:
    _, _, kind, *arguments = shlex.split(line, comments=True)
    command = typer.main.get_command(submit).commands[kind]  # type: ignore[attr-defined]
    given = command.make_context(kind, arguments).params
    own = inspect.signature(OPTIONS[kind]).parameters
    said = OPTIONS[kind](**{name: value for name, value in given.items() if name in own})
    return kind, {name: value for name, value in said.items() if value is not None}


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_documents_is_a_job(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.jsonl", "eval.jsonl", "pairs.jsonl", "sums.jsonl", "prompts.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "grader.json").write_text(json.dumps(GRADER))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)

    kind, values = spec_of(line)
    files = [value for value in values.values() if isinstance(value, LocalFile)]
    sent = {name: "file-1" if isinstance(value, LocalFile) else value for name, value in values.items()}

    assert parse_spec(kind, json.loads(json.dumps(sent)))
    assert files
    assert {file.purpose for file in files} == {"fine-tune"}


def test_options_say_what_they_are_called(tmp_path: Path) -> None:
    (data := tmp_path / "data.jsonl").write_text("{}\n")
    line = (
        f"twinkle submit sft --model m --data {data} --lr 1e-3 --eval-fraction 0.1 --patience 2 --sample a --sample b"
    )

    _, values = spec_of(line)

    spec = parse_spec("sft", {**values, "data": "file-1"})
    assert isinstance(spec, SupervisedSpec)
    assert (spec.lr, spec.eval_fraction, spec.patience, len(spec.samples)) == (1e-3, 0.1, 2, 2)


def test_beta_is_the_loss_s(tmp_path: Path) -> None:
    (data := tmp_path / "data.jsonl").write_text("{}\n")

    _, values = spec_of(f"twinkle submit dpo --model m --data {data} --beta 0.3 --loss SimPOLoss")

    spec = parse_spec("dpo", {**values, "data": "file-1"})
    assert isinstance(spec, PreferenceSpec)
    assert (spec.loss, spec.loss_config) == ("SimPOLoss", {"beta": 0.3})


def test_a_grader_is_json_or_a_file_with_it(tmp_path: Path) -> None:
    (data := tmp_path / "data.jsonl").write_text("{}\n")
    (file := tmp_path / "grader.json").write_text(json.dumps(GRADER))

    for said in (str(file), json.dumps(GRADER)):
        kind, values = spec_of(
            f"twinkle submit grpo --model m --data {data} --grader {shlex.quote(said)} --kl-coef 0.1"
        )
        spec = parse_spec(kind, {**values, "data": "file-1"})
        assert isinstance(spec, ReinforcementSpec)
        assert (spec.grader.name, spec.kl_coef, spec.group_size) == ("sum", 0.1, 8)
    with pytest.raises(ConfigError, match="there is no file"):
        spec_of(f"twinkle submit grpo --model m --data {data} --grader nowhere.json")


def test_a_budget_is_called_one_and_max_tokens_are_an_answers(capsys: pytest.CaptureFixture[str]) -> None:
    sft = spec_of("twinkle submit sft --model m --data file-1 --budget-tokens 1000 --max-hours 2")[1]
    grpo = spec_of(
        f"twinkle submit grpo --model m --data file-1 --grader '{json.dumps(GRADER)}' --max-tokens 64"
        " --budget-tokens 1000 --max-hours 2"
    )[1]
    said_nothing = capsys.readouterr().err

    assert (sft["max_train_tokens"], sft["max_hours"], "max_tokens" in sft) == (1000, 2.0, False)
    assert (grpo["max_train_tokens"], grpo["max_hours"], grpo["max_tokens"]) == (1000, 2.0, 64)
    assert said_nothing == ""


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_budgets_old_name_is_taken_with_a_word(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(f"twinkle submit {kind} --model m --data file-1 --max-tokens 1000")[1]

    assert spec["max_train_tokens"] == 1000
    assert "--max-tokens is called --budget-tokens" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="budget-tokens"):
        spec_of(f"twinkle submit {kind} --model m --data file-1 --max-tokens 1000 --budget-tokens 5")
