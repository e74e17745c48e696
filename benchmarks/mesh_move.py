"""What a client notices when its adapter goes to another mesh, by the adapter's size.

    python benchmarks/mesh_move.py [--short] [--output FILE]

One service with two meshes of one model. A run makes steps; some of them find their adapter where it was, before others
it is sent to the other mesh at the very moment the step is asked for. What counts is the difference: storing the
adapter, handing it over, reading it there, and the looks that are taken once a second. A step that forces its mesh to
end in a kill and replays is not measured here, but in ``tests/fault``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import tinker

from fusion import make_model
from machine import load_average, machine_facts
from measures import rounded
from stack import TwinkleService, end_in_order_on_sigterm
from twinkle.core.clock import SystemClock
from twinkle.storage.stores import Stores
from workload import adam_params, make_batch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "tinker", "numpy")
RANKS = (8, 32, 64)
ROUNDS = 10
MESHES = ("default", "second")
POLL_S = 0.005
BATCH = make_batch(num_datums=4, tokens_per_datum=64, vocab_size=1000, seed=0)


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small model, one rank, few rounds")
    parser.add_argument("--output", type=Path, default=RESULTS / "mesh_move.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    before = load_average()
    ranks, rounds = (RANKS[:1], 2) if arguments.short else (RANKS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        model = make_model(Path(folder) / "model", short=arguments.short)
        rows = measure(Path(folder) / "home", model, ranks, rounds=rounds)
    result = {
        "benchmark": "mesh_move",
        "machine": machine_facts(PACKAGES),
        "load_average": {"before": before, "after": load_average()},
        "rounds": rounds,
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


def measure(home: Path, model: Path, ranks: tuple[int, ...], *, rounds: int) -> list[dict[str, object]]:
    """Medians in seconds, for adapters of each rank."""
    with TwinkleService(home, model=str(model), settings={"TWINKLE_THREADS": "1"}) as service:
        stores = Stores.at(f"sqlite:///{home / 'journal.db'}", SystemClock())
        stores.moves.ask_for(MESHES[1], f"{MESHES[1]}=cpu,model={model},model-name={model}")
        while not any(mesh.name == MESHES[1] and mesh.capabilities for mesh in stores.meshes.all()):
            time.sleep(0.2)
        client = tinker.ServiceClient(base_url=service.url, api_key=service.create_key())
        rows = [row_of(stores, client, str(model), rank, rounds=rounds) for rank in ranks]
        stores.close()
    return rows


def row_of(stores: Stores, client: tinker.ServiceClient, model: str, rank: int, *, rounds: int) -> dict[str, object]:
    """One size of adapter: steps where it was, and steps that it has to move for."""
    run = client.create_lora_training_client(base_model=model, rank=rank, seed=0).result()
    step(run)
    stays, handed_over, moves = [], [], []
    for _ in range(rounds):
        stays.append(step(run))
        place = stores.moves.place_of(run.model_id)
        target = next(mesh for mesh in MESHES if mesh != place)
        started = time.perf_counter()
        stores.moves.begin(run.model_id, target)
        while stores.moves.place_of(run.model_id) != target:
            time.sleep(POLL_S)
        handed_over.append(time.perf_counter() - started)
        step(run)
        moves.append(time.perf_counter() - started)
    size = stores.snapshots.nearest(run.model_id, at=1 << 40)
    return {
        "rank": rank,
        "snapshot_mib": None if size is None else rounded(size.size_bytes / 2**20),
        "step_s": rounded(statistics.median(stays)),
        "handed_over_s": rounded(statistics.median(handed_over)),
        "moved_step_s": rounded(statistics.median(moves)),
        "the_move_s": rounded(statistics.median(moves) - statistics.median(stays)),
    }


def step(run: tinker.TrainingClient) -> float:
    """Seconds of one step of the run."""
    started = time.perf_counter()
    passed = run.forward_backward(BATCH, "cross_entropy")
    stepped = run.optim_step(adam_params())
    passed.result()
    stepped.result()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
