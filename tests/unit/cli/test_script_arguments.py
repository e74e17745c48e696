"""The arguments of training scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from twinkle.cli import CLI, Args
from twinkle.core.errors import ConfigError

EVERY_TYPE = """
    --use-lora --no-gradient-checkpointing --lazy-collect false --top-k -1 --lr 1e-4 --max-steps 1e3
    --lora-target-modules q_proj v_proj --reward-fns a,b --ddp-config {"x":1} --num-train-epochs none
    --data-slice 0:100
"""
SHARED_NAMES = """
    --max-new-tokens 5 --num-gpus 2 --seed 1 --sampling-seed 2 --model-id a/b --template-model-id c/d
"""


@pytest.fixture(autouse=True)
def _nothing_said_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TWINKLE_LR", "TWINKLE_MODEL_ID", "MAX_STEPS", "WORLD_SIZE", "SEED"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_word_every_group_has_its_defaults() -> None:
    args = CLI.from_args([])
    assert len(args.groups()) == 14
    assert (args.training.max_steps, args.optimizer.learning_rate, args.lora.lora_r) == (200, 1e-5, 8)
    assert args.model.model_id is None and args.sampler.sampler_type == "vLLMSampler"


def test_what_is_nearer_to_the_command_line_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("LR=1\nMAX_STEPS=1\nBATCH_SIZE=1\nTWINKLE_SAVE_STEPS=1\nLORA_R=1\n")
    monkeypatch.setenv("TWINKLE_LR", "2")
    monkeypatch.setenv("MAX_STEPS", "2")
    monkeypatch.setenv("TWINKLE_BATCH_SIZE", "2")
    (tmp_path / "run.yaml").write_text("learning_rate: 3\ntraining:\n  max_steps: 3\n")
    args = CLI.from_args(["--config", "run.yaml", "--lr", "4"])
    assert args.optimizer.learning_rate == 4.0
    assert args.training.max_steps == 3
    assert args.training.batch_size == 2
    assert (args.training.save_steps, args.lora.lora_r) == (1, 1)
    assert CLI.from_args([], config_file="run.yaml").optimizer.learning_rate == 3.0
    (tmp_path / "other").write_text("lr=9\n")
    monkeypatch.delenv("TWINKLE_LR")
    assert CLI.from_args([], env_file="other").optimizer.learning_rate == 9.0


@pytest.mark.parametrize(
    "words",
    [
        ["--model-id", "ms://a/b", "--max-steps", "7"],
        ["--model_id=ms://a/b", "--MAX-STEPS=7"],
        ["model_id=ms://a/b", "max-steps=7"],
    ],
)
def test_a_key_is_written_in_any_of_the_usual_ways(words: list[str]) -> None:
    args = CLI.from_args(words)
    assert args.model.model_id == "ms://a/b" and args.training.max_steps == 7


def test_values_have_the_types_of_their_fields() -> None:
    args = CLI.from_args(EVERY_TYPE.split())
    assert args.lora.use_lora and not args.model.gradient_checkpointing and not args.infra.lazy_collect
    assert args.sampling.top_k == -1 and args.optimizer.learning_rate == 1e-4 and args.training.max_steps == 1000
    assert args.lora.lora_target_modules == ["q_proj", "v_proj"] and args.rl.reward_fns == ["a", "b"]
    assert args.model.ddp_config == {"x": 1} and args.training.num_train_epochs is None
    assert args.dataset.data_slice == "0:100"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--max-steps", "many"], r"max_steps \(--max-steps\): 'many' is not a number"),
        (["--max-steps", "1.5"], "is not a whole number"),
        (["--max-steps", "inf"], "is not a whole number"),
        (["--max-steps"], r"max_steps \(--max-steps\): wants a value"),
        (["--model-id", "--lr", "1"], r"model_id \(--model-id\): wants a value"),
        (["--lora-target-modules"], "wants a value"),
        (["--fsdp-config"], "wants a value"),
        (["--lora-target-modules", "[q_proj"], "is not a JSON list"),
        (["--use-lora", "perhaps"], "is not true or false"),
        (["--truncation-strategy", "middle"], "is not one of raise, left, right, split, delete"),
        (["--fsdp-config", "x"], "is not a JSON object"),
        (["train", "--lr", "1"], "train: belongs to no argument"),
        (["--config", "none.yaml"], "no such file"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        CLI.from_args(words)


def test_a_file_that_is_no_json_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")

    with pytest.raises(ConfigError, match=r"config: run.json is no JSON"):
        CLI.from_args(["--config", "run.json"])


def test_aliases_and_names_that_several_groups_have() -> None:
    args = CLI.from_args(SHARED_NAMES.split())
    assert (args.sampling.max_tokens, args.infra.nproc_per_node) == (5, 2)
    assert (args.training.seed, args.sampling.seed) == (1, 2)
    assert (args.get_model_args()["model_id"], args.get_template_args()["model_id"]) == ("a/b", "c/d")
    assert CLI.from_args(["--use-megatron", "true"]).model.strategy == "native_fsdp"
    assert CLI.from_args(["--use-megatron", "false"]).model.strategy == "accelerate"


def test_a_template_takes_the_models_id_and_the_other_way_round() -> None:
    assert CLI.from_args(["--model-id", "a/b"]).get_template_args()["model_id"] == "a/b"
    assert CLI.from_args(["--template-model-id", "a/b"]).get_model_args()["model_id"] == "a/b"


def test_what_nobody_knows_is_kept_and_a_slip_is_said() -> None:
    with capture_logs() as said:
        args = CLI.from_args(["--my-own", "3", "--flags", "a,1", "--max-stpes", "5"])
    assert args.extra == {"my_own": 3, "flags": ["a", 1], "max_stpes": 5}
    assert args["my-own"] == 3 and args.get("my_own") == 3
    assert [(line["key"], line["did_you_mean"]) for line in said] == [("max_stpes", "max_steps")]


def test_values_are_had_by_name_and_as_one_mapping() -> None:
    args = CLI.from_args(["--lr", "0.5", "--own", "x"])
    assert args["learning_rate"] == args["lr"] == args.get("max_grad_norm", 2) - 0.5
    assert args.get("nothing", "default") == "default"
    with pytest.raises(KeyError):
        args["nothing"]
    flat = args.to_dict()
    assert flat["learning_rate"] == 0.5 and flat["own"] == "x" and flat["seed"] == 42 and "model_id" not in flat


def test_what_components_take_is_named_as_they_do() -> None:
    args = CLI.from_args(["--lr", "0.5", "--lora-r", "4"])
    assert args.get_lora_args() == {"target_modules": "all-linear", "r": 4, "lora_alpha": 32, "lora_dropout": 0.05}
    assert args.get_optimizer_args()["lr"] == 0.5 and "learning_rate" not in args.get_optimizer_args()
    assert "model_id" not in args.get_model_args()
    for group in Args().groups():
        assert isinstance(getattr(args, f"get_{group}_args")(), dict)


def test_what_an_operator_says_of_trust_is_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "ms://org/plugin@v1")
    monkeypatch.setenv("TWINKLE_HUBS", "hf,ms")
    assert CLI.from_args([]).model.trust_remote_code is True


def test_the_arguments_of_a_script_need_neither_torch_nor_the_command_line() -> None:
    code = (
        "import sys; from twinkle.cli import CLI; CLI.from_args(['--lr', '1']);"
        " print([name for name in ('torch', 'typer', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
