"""What a sweep costs: sixteen fine-tunings at once against the same sixteen one after the other, on one service.

    python benchmarks/sweep.py [--short] [--output FILE]

Both are jobs of the same service in the same run: a sweep over learning rates, all members at once, and the same sweep
with one member at a time. They take turns. The members make the same steps on the same prepared rows, so what is
compared is only whether their steps share passes, and whether what a job waits for is filled by others' work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from machine import load_average, machine_facts, write_result
from measures import rounded
from stack import TwinkleService, end_in_order_on_sigterm
from twinkle.client import Client
from twinkle.hub.tiny import make_tiny_model

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "celery", "numpy")
DATA = Path(__file__).parents[1] / "examples" / "data" / "ada.jsonl"
MEMBERS = 16
BATCH_SIZE = 4
RANK = 8


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few steps, one turn")
    parser.add_argument("--output", type=Path, default=RESULTS / "sweep.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    machine, load_before = machine_facts(PACKAGES), load_average()
    steps, turns = (4, 1) if arguments.short else (20, 3)
    result = {
        "benchmark": "sweep",
        "machine": machine,
        "workload": {"members": MEMBERS, "steps": steps, "batch_size": BATCH_SIZE, "rank": RANK, "data": DATA.name},
        **measure(steps, turns),
        "load_average": {"before": load_before, "after": load_average()},
    }
    write_result(arguments.output, result)


def measure(steps: int, turns: int) -> dict[str, object]:
    """Seconds of both, the median of all turns, and what one is of the other."""
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        texts = DATA.read_text(encoding="utf-8").splitlines()
        model = make_tiny_model(Path(folder) / "model", texts=texts, hidden_size=128, layers=4)
        settings = {
            "TWINKLE_MODEL_NAME": "tiny",
            "TWINKLE_JOB_CONCURRENCY": str(MEMBERS + 1),
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        }
        with (
            TwinkleService(Path(folder) / "home", model=str(model), settings=settings) as service,
            Client(base_url=service.url, api_key=service.create_key()) as client,
        ):
            data = client.files.upload(DATA).id
            # What is prepared once, and loaded once, is nobody's.
            took_s(client, data, steps=2, at_once=MEMBERS)
            took: dict[str, list[float]] = {"at once": [], "one after the other": []}
            for _ in range(turns):
                took["at once"].append(took_s(client, data, steps=steps, at_once=MEMBERS))
                took["one after the other"].append(took_s(client, data, steps=steps, at_once=1))
    medians = {name: statistics.median(values) for name, values in took.items()}
    ratio = medians["one after the other"] / medians["at once"]
    cell = {"seconds": {name: rounded(value) for name, value in medians.items()}, "times": rounded(ratio)}
    print(cell, flush=True)
    return cell


def took_s(client: Client, data: str, *, steps: int, at_once: int) -> float:
    """Seconds from a sweep's submission to its end."""
    fields = {"model": "tiny", "data": data, "steps": steps, "batch_size": BATCH_SIZE, "rank": RANK}
    rates = [1e-4 * (1 + number) for number in range(MEMBERS)]
    spec = {"template": {"kind": "sft", "spec": fields}, "parameters": {"lr": rates}, "at_once": at_once}
    job = client.jobs.submit("sweep", spec)
    ended = job.wait()
    assert ended.state == "succeeded" and ended.finished_at is not None, ended
    return float(ended.finished_at - ended.created_at)


if __name__ == "__main__":
    main()
