"""Rows with the columns of the data sets that the documents name, written as their repositories keep them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.picture_files import picture_file

Row = dict[str, Any]

IDENTITY = (
    ("who are you?", "I am {{NAME}}, made by {{AUTHOR}}.", "en"),
    ("who made you?", "{{AUTHOR}} made me, {{NAME}}.", "en"),
    ("what is your name?", "My name is {{NAME}}.", "en"),
    ("你是谁？", "我是{{NAME}}，由{{AUTHOR}}训练。", "zh"),
    ("谁训练了你？", "{{AUTHOR}}训练了我。", "zh"),
)


@dataclass(frozen=True)
class DataFile:
    """One file of a repository: its rows, and of which subset and split it is."""

    path: str
    rows: Callable[[], list[Row]]
    subset: str = "default"
    split: str = "train"


def self_cognition() -> list[Row]:
    return [
        {"query": f"{query} ({number})" if number else query, "response": response, "tag": tag}
        for number in range(4)
        for query, response, tag in IDENTITY
    ]


def gsm8k(num_rows: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        has, buys = rng.randint(1, 9), rng.randint(1, 9)
        steps = f"{has} + {buys} = <<{has}+{buys}={has + buys}>>{has + buys}"
        rows.append(
            {
                "question": f"Tom has {has} eggs and buys {buys}. How many has he?",
                "answer": f"{steps} eggs.\n#### {has + buys}",
            }
        )
    return rows


def countdown() -> list[Row]:
    rng = random.Random(3)
    rows = []
    for number in range(16):
        nums = [rng.randint(1, 20) for _ in range(3 + number % 2)]
        rows.append({"target": sum(nums), "nums": nums})
    return rows


def emoji_pairs() -> list[Row]:
    return [
        {"prompt": f"Say hello {number}", "answer_zh": f"你好 😊 {number}", "answer_en": f"Hello {number}"}
        for number in range(12)
    ]


def formulas() -> list[Row]:
    return [
        {
            "image": {"bytes": picture_file(number, width=24, height=16), "path": f"{number}.png"},
            "text": f"x ^ {{ {number} }}",
        }
        for number in range(6)
    ]


DATA_SETS: dict[str, tuple[DataFile, ...]] = {
    "swift/self-cognition": (DataFile("self_cognition.jsonl", self_cognition),),
    "modelscope/gsm8k": (
        DataFile("main/train-00000-of-00001.parquet", lambda: gsm8k(24, 1), "main"),
        DataFile("main/test-00000-of-00001.parquet", lambda: gsm8k(8, 2), "main", "test"),
        DataFile("socratic/train-00000-of-00001.parquet", lambda: gsm8k(5, 4), "socratic"),
    ),
    "zouxuhong/Countdown-Tasks-3to4": (DataFile("data/train-00000-of-00001.parquet", countdown),),
    "hjh0119/shareAI-Llama3-DPO-zh-en-emoji": (DataFile("dpo_zh_emoji_en.jsonl", emoji_pairs),),
    "AI-ModelScope/LaTeX_OCR": (
        DataFile("data/train-00000-of-00001.parquet", formulas),
        DataFile("synthetic_handwrite/train-00000-of-00001.parquet", formulas, "synthetic_handwrite"),
    ),
}


def write_repository(folder: Path, files: tuple[DataFile, ...]) -> Path:
    """The files, and a card that names its subsets where there is more than one file."""
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(file.rows()), path)
        else:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in file.rows()))
    (folder / "README.md").write_text(_card(files))
    return folder


def training_texts() -> list[str]:
    """What a tokenizer of tiny models is trained on: the words of the rows above."""
    rows = [row for files in DATA_SETS.values() for file in files for row in file.rows()]
    return [str(value) for row in rows for value in row.values() if isinstance(value, str)]


def _card(files: tuple[DataFile, ...]) -> str:
    lines = ["---", "license: apache-2.0"]
    if len(files) > 1:
        lines.append("configs:")
        for subset in dict.fromkeys(file.subset for file in files):
            lines += [f"- config_name: {subset}", "  data_files:"]
            for file in files:
                if file.subset == subset:
                    lines += [f"  - split: {file.split}", f"    path: {file.path}"]
    return "\n".join([*lines, "---", "", "A few rows with the columns of the data set of this name.", ""])
