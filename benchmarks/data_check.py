"""Lines a second of looking at tenants' files: as JSON, as a batch's requests, and encoded for a training.

    python benchmarks/data_check.py [--short] [--output FILE]

All read one file of conversations out of an object store in a folder, in pieces, as the API and the jobs process do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from machine import load_average, machine_facts
from measures import rounded
from twinkle.hub.tiny import make_tiny_model
from twinkle.jobs.data import DataRequest
from twinkle.storage.blobs import FolderStore
from twinkle.storage.files.reading import stretches_of
from twinkle.storage.files.records import FilePiece
from twinkle.wire.jsonl import BatchCheck, ObjectCheck, lines_of
from twinkle.workers.jobs.data_work import DataWork, prepare

RESULTS = Path(__file__).parent / "results"
TEXTS = Path(__file__).parents[1] / "examples" / "data" / "self_cognition.jsonl"
PACKAGES = ("orjson", "transformers", "tokenizers", "numpy")
PIECE_BYTES = 8 * 2**20
CHAT = "/v1/chat/completions"


def main() -> None:
    """Measures the three in turns and writes a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer lines and rounds: to see that it works")
    parser.add_argument("--output", type=Path, default=RESULTS / "data_check.json")
    arguments = parser.parse_args()
    num_lines, rounds = (500, 2) if arguments.short else (50_000, 5)
    before = load_average()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), num_lines=num_lines, rounds=rounds)
    result |= {"machine": machine_facts(PACKAGES), "load_average": {"before": before, "after": load_average()}}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["lines_per_second"], indent=2))


def measure(folder: Path, *, num_lines: int, rounds: int) -> dict[str, object]:
    """The median of each."""
    store = FolderStore(folder / "objects")
    model = make_tiny_model(folder / "tiny", texts=[TEXTS.read_text()], vocab_size=2000)
    chats = _put(store, "chats", [_chat(number) for number in range(num_lines)])
    requests = _put(store, "requests", [_request(number) for number in range(num_lines)])
    turns = iter(range(1_000_000))
    sides: dict[str, Callable[[], int]] = {
        "json": lambda: _check_json(store, chats),
        "batch": lambda: _check_batch(store, requests),
        "encode": lambda: _encode(folder, model, chats, next(turns)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            assert side() == num_lines
            seconds[name].append(time.perf_counter() - start)
    rates = {name: rounded(num_lines / statistics.median(took)) for name, took in seconds.items()}
    return {"lines": num_lines, "rounds": rounds, "lines_per_second": rates}


def _chat(number: int) -> object:
    answer = f"{number} and three is {number + 3}. " * 8
    question = {"role": "user", "content": f"What is {number} and three, in words and in numbers?"}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def _request(number: int) -> object:
    body = {"model": "m", "messages": [{"role": "user", "content": f"What is {number}?"}], "max_tokens": 100}
    return {"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": body}


def _put(store: FolderStore, name: str, rows: Sequence[object]) -> tuple[FilePiece, ...]:
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    pieces = []
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        store.put(key := f"files/{name}/{start}", piece)
        pieces.append(FilePiece(key=key, size_bytes=len(piece)))
    return tuple(pieces)


def _check_json(store: FolderStore, pieces: Sequence[FilePiece]) -> int:
    check = ObjectCheck()
    for stretch in stretches_of(store, pieces):
        check.feed(stretch)
    return check.finish().num_lines


def _check_batch(store: FolderStore, pieces: Sequence[FilePiece]) -> int:
    check = BatchCheck(CHAT)
    return sum(check.look_at(line) is not None for line in lines_of(stretches_of(store, pieces)))


def _encode(folder: Path, model: Path, pieces: tuple[FilePiece, ...], turn: int) -> int:
    outcome = prepare(
        DataWork(
            request=DataRequest(tenant="t", model="m", file="file-1"),
            digest="d",
            folder=f"prepared/day/{turn}",
            object_store=str(folder / "objects"),
            model_path=str(model),
            max_length=2048,
            vocab_size=2000,
            file_name="chats.jsonl",
            pieces=pieces,
        )
    )
    return outcome.num_rows - outcome.num_wrong


if __name__ == "__main__":
    main()
