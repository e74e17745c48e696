"""What a step of the training library costs, against the trainers that most people use, on the same batch.

    python benchmarks/library.py [--short] [--threads N] [--output FILE]

All parameters: ``TransformersModel`` and ``transformers.Trainer``. A LoRA adapter of rank 8: ``TransformersModel``, the
fused ``MultiLoraTransformersModel``, ``transformers.Trainer`` on a PEFT model, and TRL's ``SFTTrainer`` where TRL is
installed. The sides take turns, each with the same model, rows, optimizer, clipping and threads; the first step of each
turn is not counted. Every side's first loss must be the same, or it has trained something else. Beside the time that a
step takes stands that of the processor, which others on the machine do not change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from library_tables import library_text
from machine import load_average, machine_facts
from markdown_table import Result
from measures import rounded
from twinkle.hub.tiny import make_tiny_model
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.fused.determinism import prepare_environment

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate")
TEXTS = Path(__file__).parents[1] / "examples" / "data" / "self_cognition.jsonl"
RANK = 8
RATE = 1e-3
LARGEST_DIFFERENCE = 1e-2
"""Between the first losses of two sides, of which some report four digits."""

Moment = tuple[float, float]
"""Seconds that passed, and those of the processor, all threads together."""
Turn = tuple[list[Moment], float]
"""What each step but the first took, and the first step's loss a token."""


def now() -> Moment:
    return time.perf_counter(), time.process_time()


def since(start: Moment) -> Moment:
    passed, computed = now()
    return passed - start[0], computed - start[1]


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear")


def make_rows(num_rows: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = torch.randint(10, vocab_size, (num_rows, length), generator=generator).tolist()
    return rows


def our_turn(model: TransformersModel | MultiLoraTransformersModel, rows: list[list[int]], num_steps: int) -> Turn:
    """The loop of a script on our side."""
    batch = [{"input_ids": row, "labels": [*row[1:], -100]} for row in rows]
    model.set_loss("CrossEntropyLoss", reduction="sum")
    model.set_optimizer("AdamW", lr=RATE, weight_decay=0.0)
    seconds: list[Moment] = []
    first_loss = 0.0
    for step in range(num_steps + 1):
        start = now()
        output = model.forward_backward(inputs=batch)
        model.clip_grad_and_step(1.0)
        seconds.append(since(start))
        if step == 0:
            first_loss = output["loss"] / output["num_tokens"]
    return seconds[1:], first_loss


def plain_side(folder: Path, rows: list[list[int]], num_steps: int, *, adapter: bool) -> Turn:
    model = TransformersModel(model_id=str(folder), gradient_checkpointing=False, mixed_precision="no")
    if adapter:
        model.add_adapter_to_model("bench", lora())
    return our_turn(model, rows, num_steps)


def fused_side(folder: Path, rows: list[list[int]], num_steps: int) -> Turn:
    num_tokens = sum(len(row) for row in rows)
    model = MultiLoraTransformersModel(model_id=str(folder), max_loras=1, max_length=num_tokens, mixed_precision="no")
    model.add_adapter_to_model("bench", lora())
    return our_turn(model, rows, num_steps)


class StepTimes(transformers.TrainerCallback):
    """When each step began and ended, and the loss that the first one logged."""

    def __init__(self) -> None:
        self.seconds: list[Moment] = []
        self.losses: list[float] = []
        self._start = now()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(since(self._start))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def trainer_side(
    folder: Path, rows: list[list[int]], num_steps: int, *, adapter: bool, trainer: Any, arguments: Any
) -> Turn:
    """One of the trainers: it shifts labels itself, and averages over tokens."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        model = peft.get_peft_model(model, lora())
    data = [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in rows] * (num_steps + 1)
    times = StepTimes()
    with tempfile.TemporaryDirectory() as scratch:
        settings = arguments(
            output_dir=scratch,
            per_device_train_batch_size=len(rows),
            max_steps=num_steps + 1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
        )
        trainer(
            model=model,
            args=settings,
            train_dataset=data,
            data_collator=transformers.default_data_collator,
            callbacks=[times],
        ).train()
    return times.seconds[1:], times.losses[0]


def sides(folder: Path, rows: list[list[int]], num_steps: int) -> dict[str, dict[str, Callable[[], Turn]]]:
    """What is compared with what; the first of each comparison is what the others are divided by."""
    plain = {"trainer": transformers.Trainer, "arguments": transformers.TrainingArguments}
    compared: dict[str, dict[str, Callable[[], Turn]]] = {
        "all parameters": {
            "transformers.Trainer": lambda: trainer_side(folder, rows, num_steps, adapter=False, **plain),
            "TransformersModel": lambda: plain_side(folder, rows, num_steps, adapter=False),
        },
        "LoRA": {
            "transformers.Trainer": lambda: trainer_side(folder, rows, num_steps, adapter=True, **plain),
            "TransformersModel": lambda: plain_side(folder, rows, num_steps, adapter=True),
            "MultiLoraTransformersModel": lambda: fused_side(folder, rows, num_steps),
        },
    }
    if find_spec("trl") is not None:
        trl = import_module("trl")

        def arguments(**settings: Any) -> Any:
            return trl.SFTConfig(**settings, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False)

        sft = {"trainer": sft_trainer(trl), "arguments": arguments}
        compared["LoRA"]["trl.SFTTrainer"] = lambda: trainer_side(folder, rows, num_steps, adapter=True, **sft)
        compared["all parameters"]["trl.SFTTrainer"] = lambda: trainer_side(
            folder, rows, num_steps, adapter=False, **sft
        )
    return compared


def sft_trainer(trl: Any) -> Callable[..., Any]:
    """TRL's trainer on rows that are encoded; it wants a data set of its library and a tokenizer beside the model."""
    datasets = import_module("datasets")

    def make(*, model: Any, train_dataset: list[dict[str, list[int]]], **settings: Any) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.config._name_or_path)
        rows = datasets.Dataset.from_list(train_dataset)
        return trl.SFTTrainer(model=model, train_dataset=rows, processing_class=tokenizer, **settings)

    return make


def summary(turns: Mapping[str, list[Turn]]) -> dict[str, Any]:
    """Milliseconds a step by side, and how many times the first side's; medians over turns of the same round."""
    first = next(iter(turns))
    losses = {name: of_side[0][1] for name, of_side in turns.items()}
    for name, loss in losses.items():
        if abs(loss - losses[first]) > LARGEST_DIFFERENCE:
            raise RuntimeError(f"{name} begins with the loss {loss}, {first} with {losses[first]}: not the same step")
    return {
        name: {"step_ms": passed[0], "of_the_first": passed[1], "cpu_ms": computed[0], "cpu_of_the_first": computed[1]}
        | {"first_loss": rounded(losses[name])}
        for name in turns
        for passed, computed in [(_beside(turns, name, first, 0), _beside(turns, name, first, 1))]
    }


def _beside(turns: Mapping[str, list[Turn]], name: str, first: str, which: int) -> tuple[float, float]:
    """Milliseconds a step, and how many times the first side's."""
    own, others = (
        [statistics.median(moment[which] for moment in seconds) for seconds, _ in turns[side]] for side in (name, first)
    )
    ratios = [mine / other for mine, other in zip(own, others, strict=True)]
    return rounded(1000 * statistics.median(own)), rounded(statistics.median(ratios))


def measure(*, hidden_size: int, layers: int, num_rows: int, length: int, rounds: int, num_steps: int) -> Result:
    """All comparisons on one model."""
    before = load_average()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_model(
            Path(scratch) / "model",
            texts=[TEXTS.read_text()],
            hidden_size=hidden_size,
            layers=layers,
            vocab_size=2000,
            context=max(512, length),
        )
        vocab_size = transformers.AutoConfig.from_pretrained(folder).vocab_size
        rows = make_rows(num_rows, length, vocab_size)
        results: dict[str, Any] = {}
        for name, compared in sides(folder, rows, num_steps).items():
            turns: dict[str, list[Turn]] = {side: [] for side in compared}
            for _ in range(rounds):
                for side, take_turn in compared.items():
                    turns[side].append(take_turn())
            results[name] = summary(turns)
    return {
        "machine": machine_facts(PACKAGES),
        "load_average": {"before": before, "after": load_average()},
        "threads": torch.get_num_threads(),
        "batch": {"rows": num_rows, "tokens": length, "hidden_size": hidden_size, "layers": layers},
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a tiny model and few steps: does it run at all")
    parser.add_argument("--output", type=Path, default=RESULTS / "library.json")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on every side; more are for an idle machine")
    arguments = parser.parse_args()
    prepare_environment()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    size = {"hidden_size": 64, "layers": 2, "num_rows": 4, "length": 32, "rounds": 1, "num_steps": 3}
    if not arguments.short:
        size = {"hidden_size": 256, "layers": 4, "num_rows": 8, "length": 128, "rounds": 3, "num_steps": 5}
    result = measure(**size)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(library_text(result))


if __name__ == "__main__":
    main()
