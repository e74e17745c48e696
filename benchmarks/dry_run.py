"""What dry runs foretell against what the jobs then take, for each kind of job, on one service.

    python benchmarks/dry_run.py [--short] [--output FILE]

Each kind runs once, so that the mesh has been measured, then as a dry run, then again as it was foretold. Compared are
seconds: of the device, as the tenant's account counts them, and from the job's
beginning to its end. A model of random weights hardly ever ends an answer, so the most is what is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from machine import load_average, machine_facts, write_result
from measures import rounded
from stack import TwinkleService, end_in_order_on_sigterm
from twinkle.client import Client
from twinkle.hub.tiny import make_tiny_model

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "celery", "numpy")
DATA = Path(__file__).parents[1] / "examples" / "data" / "arithmetic.jsonl"
NUM_ROWS = 64
WITHIN = 0.25
"""How far the time may lie outside of what was foretold: a quarter."""
POLICY = {"batch_size": 4, "group_size": 4, "max_tokens": 16}
GRADER = {"type": "regexp", "name": "vowels", "pattern": "[aeiou]"}

Spec = dict[str, object]


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few steps")
    parser.add_argument("--output", type=Path, default=RESULTS / "dry_run.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    machine, load_before = machine_facts(PACKAGES), load_average()
    steps = 6 if arguments.short else 40
    result = {
        "benchmark": "dry_run",
        "machine": machine,
        "workload": {"steps": steps, "rows": NUM_ROWS, "data": DATA.name, "within": WITHIN},
        "kinds": measure(steps),
        "load_average": {"before": load_before, "after": load_average()},
    }
    write_result(arguments.output, result)


def measure(steps: int) -> list[dict[str, object]]:
    """A line for each kind: what was foretold, and what it took."""
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        lines = DATA.read_text(encoding="utf-8").splitlines()[:NUM_ROWS]
        model = make_tiny_model(Path(folder) / "model", texts=lines, hidden_size=128, layers=4)
        settings = {"TWINKLE_MODEL_NAME": "tiny", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        with (
            TwinkleService(Path(folder) / "home", model=str(model), settings=settings) as service,
            Client(base_url=service.url, api_key=service.create_key()) as client,
        ):
            found = []
            for kind, spec in specs(client, Path(folder), lines, steps).items():
                found.append(foretold(service, client, kind, spec))
                print(found[-1], flush=True)
    return found


def specs(client: Client, folder: Path, lines: list[str], steps: int) -> Mapping[str, Spec]:
    """What each kind is asked to do, by its name."""
    rows = [json.loads(line)["messages"] for line in lines]
    wrong = [{"role": "assistant", "content": "I do not know."}]
    data = {
        "train": lines,
        "pairs": [
            json.dumps({"input": {"messages": row[:1]}, "preferred_output": row[1:], "non_preferred_output": wrong})
            for row in rows
        ],
        "prompts": [json.dumps({"messages": row[:1]}) for row in rows],
        "requests": [json.dumps(_request(*one)) for one in enumerate(rows * max(1, steps // 8))],
        "steps": [json.dumps(one) for number in range(steps) for one in _step(number)],
    }
    files = {}
    for name, content in data.items():
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(content), encoding="utf-8")
        purpose = {"requests": "batch", "steps": "user_data"}.get(name, "fine-tune")
        files[name] = client.files.upload(path, purpose=purpose).id
    common: Spec = {"model": "tiny", "steps": steps, "batch_size": 8, "rank": 8, "eval_fraction": 0.2, "seed": 1}
    learns: Spec = {**common, **POLICY, "data": files["prompts"]}
    return {
        "sft": {**common, "data": files["train"]},
        "dpo": {**common, "data": files["pairs"]},
        "grpo": {**learns, "grader": GRADER},
        "distill": {**learns, "teacher": "tiny"},
        "batch": {"model": "tiny", "data": files["requests"], "endpoint": "/v1/chat/completions", "seed": 1},
        "ops": {"model": "tiny", "data": files["steps"], "rank": 8, "seed": 1},
    }


def foretold(service: TwinkleService, client: Client, kind: str, spec: Spec) -> dict[str, object]:
    """Run a job, ask what it would take, and run it again."""
    run(client, kind, spec)
    told = run(client, kind, {**spec, "dry_run": True})[0]
    before = _device_s(service)
    _, took_s = run(client, kind, spec)
    device_s = _device_s(service) - before
    time, device = told["time"], told["price"]["device_seconds"]
    return {
        "kind": kind,
        "foretold_s": [rounded(time[name]) for name in ("low_s", "high_s")],
        "took_s": rounded(took_s),
        "is_within": _is_within(took_s, time["low_s"], time["high_s"]),
        "foretold_device_s": [rounded(one) for one in device],
        "device_s": rounded(device_s),
        "device_is_within": _is_within(device_s, *device),
    }


def run(client: Client, kind: str, spec: Spec) -> tuple[dict[str, Any], float]:
    """A job to its end: its result, and how long it ran."""
    ended = client.jobs.submit(kind, spec).wait()
    assert ended.state == "succeeded" and ended.result is not None, (kind, ended.failure)
    assert ended.started_at is not None and ended.finished_at is not None
    return ended.result, ended.finished_at - ended.started_at


def _device_s(service: TwinkleService) -> float:
    """What all operations have taken of the device so far."""
    with closing(sqlite3.connect(service.home / "journal.db")) as journal:
        return float(journal.execute("SELECT COALESCE(SUM(device_s), 0) FROM operation").fetchone()[0])


def _is_within(took: float, low: float, high: float) -> bool:
    return low * (1 - WITHIN) <= took <= high * (1 + WITHIN)


def _request(number: int, row: list[Spec]) -> Spec:
    body = {"model": "tiny", "messages": row[:1], "max_tokens": 16}
    return {"custom_id": f"n-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def _step(number: int) -> list[Spec]:
    tokens = list(range(number, number + 32))
    inputs = {"target_tokens": tokens, "weights": [1.0] * len(tokens)}
    return [
        {"op": "forward_backward", "data": [{"tokens": tokens, "inputs": inputs}] * 8},
        {"op": "optim_step"},
        {"op": "sample", "prompt": tokens, "sampling_params": {"max_tokens": 8, "seed": number}},
    ]


if __name__ == "__main__":
    main()
