"""Rows a second of encoding and packing, against plain ``datasets`` with ``apply_chat_template``, and TRL's packing.

    python benchmarks/data.py [--short] [--output FILE]

All sides read one file, take turns, and are checked to have made the same tokens of it. Ours also finds which tokens
train and shifts the labels, which the plain way does not; what a packed row is made of is read by every side. TRL is
asked where it is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer

from machine import load_average, machine_facts
from measures import rounded
from twinkle.dataset import DatasetMeta, PackingDataset
from twinkle.hub.tiny import make_tiny_model

RESULTS = Path(__file__).parent / "results"
TEXTS = Path(__file__).parents[1] / "examples" / "data" / "self_cognition.jsonl"
PACKAGES = ("datasets", "transformers", "tokenizers", "trl", "pyarrow")
PACKED_LENGTH = 1024
TRL = "TRL"
Moment = tuple[float, float]
"""By the clock, and by the time of the processor, which others on the machine do not change."""


def now() -> Moment:
    return time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Turn:
    """What one side took, and what it made: a number for each row (encoding) or packed row (packing)."""

    seconds: float
    cpu_s: float
    lengths: list[int]

    @classmethod
    def since(cls, start: Moment, lengths: list[int], end: Moment) -> Turn:
        """What began at a moment and ended at another."""
        return cls(end[0] - start[0], end[1] - start[1], lengths)


def main() -> None:
    """Measures all sides in turns and writes a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer rows and rounds: to see that it works")
    parser.add_argument("--output", type=Path, default=RESULTS / "data.json")
    arguments = parser.parse_args()
    num_rows, rounds = (500, 3) if arguments.short else (5_000, 5)
    before = load_average()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        result = measure(Path(folder), num_rows=num_rows, rounds=rounds)
    result |= {"machine": machine_facts(PACKAGES), "load_average": {"before": before, "after": load_average()}}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: result[name] for name in ("encode", "pack", "packed_rows")}, indent=2))


def measure(folder: Path, *, num_rows: int, rounds: int) -> dict[str, Any]:
    """The rows a second of every side."""
    lines = [json.loads(line) for line in TEXTS.read_text().splitlines()]
    model = make_tiny_model(folder / "model", texts=[json.dumps(line, ensure_ascii=False) for line in lines])
    path = write_rows(folder / "rows.jsonl", lines, num_rows)
    encoding = {"twinkle": lambda: encode_ours(path, model), "datasets": lambda: encode_plainly(path, model)}
    encoded = in_turns(encoding, rounds)
    check_same("tokens of each row", encoded)
    packing: dict[str, Callable[[], Turn]] = {"twinkle": packer(path, model)}
    if find_spec("trl") is None:
        print("TRL is not installed, so packing is not compared with it: pip install trl")
    else:
        packing[TRL] = packer_of_trl(path, model)
    packed = in_turns(packing, rounds)
    return {
        "rows": num_rows,
        "rounds": rounds,
        "packed_length": PACKED_LENGTH,
        "encode": summary(encoded, num_rows, against="datasets"),
        "pack": summary(packed, num_rows, against=TRL),
        "packed_rows": {name: len(turns[-1].lengths) for name, turns in packed.items()},
    }


def write_rows(path: Path, lines: list[Mapping[str, Any]], num_rows: int) -> Path:
    """Conversations of one to four rounds out of the shipped text; the same for everybody."""
    chance = random.Random(7)
    with path.open("w") as file:
        for _ in range(num_rows):
            rounds = [chance.choice(lines) for _ in range(chance.randint(1, 4))]
            messages = [message for line in rounds for message in line["messages"]]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def in_turns(sides: Mapping[str, Callable[[], Turn]], rounds: int) -> dict[str, list[Turn]]:
    """Lets all sides work, one after the other, in changing order; the first time of each does not count."""
    for side in sides.values():
        side()
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            turns[name].append(sides[name]())
    return turns


def encode_ours(path: Path, model: Path) -> Turn:
    """Read, encode, label."""
    start = now()
    dataset = encoded_ours(path, model)
    end = now()
    return Turn.since(start, dataset.dataset["length"][:], end)


def encoded_ours(path: Path, model: Path) -> PackingDataset:
    """Our data set, not packed yet."""
    dataset = PackingDataset(DatasetMeta(str(path)))
    dataset.set_template("Template", model_id=str(model), max_length=PACKED_LENGTH, truncation_strategy="right")
    dataset.encode()
    return dataset


def encode_plainly(path: Path, model: Path) -> Turn:
    """Read and encode, the shortest way there is; no labels."""
    start = now()
    rows = encoded_plainly(path, model)
    end = now()
    return Turn.since(start, [len(ids) for ids in rows["input_ids"][:]], end)


def encoded_plainly(path: Path, model: Path) -> datasets.Dataset:
    """A data set of Hugging Face's with ``input_ids``."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = datasets.load_dataset("json", data_files=str(path), split="train")

    def encode(row: Mapping[str, Any]) -> dict[str, Any]:
        ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
        return {"input_ids": ids[:PACKED_LENGTH]}

    return rows.map(encode, load_from_cache_file=False)


def packer(path: Path, model: Path) -> Callable[[], Turn]:
    """Packs our rows and reads every packed row."""
    dataset = encoded_ours(path, model)

    def pack() -> Turn:
        start = now()
        dataset.pack_dataset()
        lengths = [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
        return Turn.since(start, lengths, now())

    return pack


def packer_of_trl(path: Path, model: Path) -> Callable[[], Turn]:
    """Packs the same rows, with the same four columns, by TRL's best fit."""
    from trl.data_utils import pack_dataset  # noqa: PLC0415 - of the benchmark alone, where it is installed

    names = ["input_ids", "labels", "attention_mask", "position_ids"]
    rows = encoded_ours(path, model).dataset.select_columns(names)

    def pack() -> Turn:
        start = now()
        packed = pack_dataset(rows, PACKED_LENGTH, strategy="bfd", map_kwargs={"load_from_cache_file": False})
        lengths = [len(packed[index]["input_ids"]) for index in range(len(packed))]
        return Turn.since(start, lengths, now())

    return pack


def check_same(what: str, turns: Mapping[str, list[Turn]]) -> None:
    """Raises RuntimeError unless all sides have made the same of the rows: else they would not be doing the same."""
    first, *others = turns
    for other in others:
        if turns[other][-1].lengths != turns[first][-1].lengths:
            raise RuntimeError(f"{what}: {other} has made others than {first}")


def summary(turns: Mapping[str, list[Turn]], num_rows: int, *, against: str) -> dict[str, Any]:
    """Rows a second of each side, and how many times quicker ours was beside the other: median and quartiles."""
    told: dict[str, Any] = {
        "rows_per_s": {
            name: rounded(num_rows / statistics.median(turn.seconds for turn in done)) for name, done in turns.items()
        },
        "tokens": {name: sum(done[-1].lengths) for name, done in turns.items()},
    }
    if against in turns:
        both = list(zip(turns[against], turns["twinkle"], strict=True))
        told["times_as_quick"] = spread([other.seconds / ours.seconds for other, ours in both])
        told["times_as_little_cpu"] = spread([other.cpu_s / ours.cpu_s for other, ours in both])
    return told


def spread(ratios: list[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": rounded(middle), "quartiles": [rounded(low), rounded(high)]}


if __name__ == "__main__":
    main()
