"""What bringing a training's weights to samplers costs, in bytes a second: in buckets, over gloo on a CPU.

    python benchmarks/weight_sync.py [--short] [--samplers N ...] [--output FILE]

One process sends, each of the others copies what arrives over weights of its own, as a sampler does. Beside it, in
turns in the same processes: the same copy within one process, which is as fast as memory goes, and the sender writing a
safetensors file that each of the others reads and copies. An adapter is measured too: there the meeting counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from machine import load_average, machine_facts, write_result
from measures import rounded

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "safetensors")
LIMIT_S = 300.0
NUM_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Load:
    """Weights in bfloat16: square matrices, as most of a model's are."""

    name: str
    matrices: int
    width: int

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.matrices * self.width * self.width * 2


LOADS = (Load(name="model", matrices=128, width=2048), Load(name="adapter", matrices=64, width=256))
SHORT_LOADS = (Load(name="model", matrices=32, width=2048), Load(name="adapter", matrices=64, width=256))


class End:
    """One process of the benchmark: the first sends, the others take over."""

    def __init__(self, rank: int) -> None:
        import torch  # noqa: PLC0415 - the parent only orders and needs none of it

        from twinkle.checkpoint_engine import ProcessGroupCheckpointEngine  # noqa: PLC0415

        torch.set_num_threads(1)
        self._rank = rank
        self._engine = ProcessGroupCheckpointEngine()
        self._engine.is_sender = rank == 0
        self._weights: dict[str, Any] = {}

    def make(self, load: Load) -> None:
        """The weights; not the same in any two processes."""
        import torch  # noqa: PLC0415 - see above

        self._weights = {
            f"layer.{number}": torch.full((load.width, load.width), float(self._rank + number), dtype=torch.bfloat16)
            for number in range(load.matrices)
        }
        self._spare = {name: tensor.clone() for name, tensor in self._weights.items()}

    def prepare(self) -> Any:
        """The first half of the meeting."""
        return self._engine.prepare()

    def meet(self, arguments: Mapping[str, Any]) -> None:
        """The second."""
        self._engine.init_process_group(**arguments)

    def sync(self) -> None:
        """Send, or copy what arrives."""
        if self._rank == 0:
            self._engine.send_weights(iter(self._weights.items()))
        else:
            for name, tensor in self._engine.receive_weights():
                self._weights[name].copy_(tensor)

    def part(self) -> None:
        """The end of the sync."""
        self._engine.finalize()

    def copy(self) -> None:
        """What a sampler does with weights that are in its memory already."""
        for name, tensor in self._weights.items():
            self._spare[name].copy_(tensor)

    def write(self, path: str) -> None:
        """A file, without waiting for the disk."""
        from safetensors.torch import save_file  # noqa: PLC0415 - see above

        save_file(self._weights, path)

    def read(self, path: str) -> None:
        """From the file, which is in memory still."""
        from safetensors.torch import load_file  # noqa: PLC0415 - see above

        for name, tensor in load_file(path).items():
            self._weights[name].copy_(tensor)

    def first(self) -> float:
        """A number of the weights, to see that they are the sender's."""
        return float(self._weights["layer.0"][0, 0])


def serve(connection: Connection, rank: int) -> None:
    """Carries out what the parent asks for, until it asks for nothing."""
    end = End(rank)
    while asked := connection.recv():
        name, *arguments = asked
        connection.send(getattr(end, name)(*arguments))


class Ends:
    """The processes, as the parent sees them."""

    def __init__(self, samplers: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(samplers + 1)]
        self.samplers = samplers
        self._connections = [ours for ours, _ in pairs]
        self._processes = [
            spawn.Process(target=serve, args=(theirs, rank), daemon=True) for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def ask(self, ranks: range | list[int], name: str, *arguments: object, each: list[Any] | None = None) -> list[Any]:
        """Asks these at once, and waits for all."""
        for place, rank in enumerate(ranks):
            self._connections[rank].send((name, *(arguments if each is None else (each[place],))))
        answers = []
        for rank in ranks:
            if not self._connections[rank].poll(LIMIT_S):
                raise TimeoutError(f"rank {rank} has not answered {name} within {LIMIT_S:g} s")
            answers.append(self._connections[rank].recv())
        return answers

    def close(self) -> None:
        """Ends them."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join(LIMIT_S)


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a quarter of the weights, one sampler, few rounds")
    parser.add_argument("--samplers", type=int, nargs="+", help="how many, one after the other; 1 and 2 if omitted")
    parser.add_argument("--output", type=Path, default=RESULTS / "weight_sync.json")
    arguments = parser.parse_args()
    machine, load_before, started = machine_facts(PACKAGES), load_average(), time.monotonic()
    loads, rounds = (SHORT_LOADS, 2) if arguments.short else (LOADS, NUM_ROUNDS)
    cells = [
        cell
        for samplers in arguments.samplers or ([1] if arguments.short else [1, 2])
        for cell in measure(samplers, loads, rounds=rounds)
    ]
    result = {
        "benchmark": "weight_sync",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "duration_s": round(time.monotonic() - started),
        "cells": cells,
    }
    write_result(arguments.output, result)


def measure(samplers: int, loads: tuple[Load, ...], *, rounds: int) -> list[dict[str, object]]:
    """All ways in turn, load after load."""
    cells: list[dict[str, object]] = []
    ends = Ends(samplers)
    try:
        for load in loads:
            everyone = range(samplers + 1)
            ends.ask(everyone, "make", load)
            times: dict[str, list[float]] = {}
            for number in range(rounds + 1):
                for name, seconds in one_round(ends).items():
                    # The first one finds memory that nobody has touched yet.
                    if number:
                        times.setdefault(name, []).append(seconds)
            cells.append(summary(load, samplers, times))
            print(cells[-1], flush=True)
    finally:
        ends.close()
    return cells


def one_round(ends: Ends) -> dict[str, float]:
    """Seconds of each way, meeting and carrying apart."""
    everyone, others = range(ends.samplers + 1), range(1, ends.samplers + 1)
    taken: dict[str, float] = {}

    def timed(name: str, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        run()
        taken[name] = time.perf_counter() - start

    timed("copy", lambda: ends.ask([1], "copy"))
    timed("meet", lambda: meet(ends))
    timed("sync", lambda: ends.ask(everyone, "sync"))
    ends.ask(everyone, "part")
    if len({*ends.ask(everyone, "first")}) != 1:
        raise RuntimeError("the samplers do not have the sender's weights")
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        path = str(Path(folder) / "weights.safetensors")
        timed("write", lambda: ends.ask([0], "write", path))
        timed("read", lambda: ends.ask(others, "read", path))
    return taken


def meet(ends: Ends) -> None:
    """As a manager lets its groups meet."""
    from twinkle.checkpoint_engine import ProcessGroupCheckpointEngine  # noqa: PLC0415 - the parent loads torch once

    everyone = range(ends.samplers + 1)
    ours, theirs = ProcessGroupCheckpointEngine.build_topology(1, ends.samplers, ends.ask(everyone, "prepare"))
    arguments = [{name: values[0] for name, values in ours.items()}]
    arguments += [{name: values[place] for name, values in theirs.items()} for place in range(ends.samplers)]
    ends.ask(everyone, "meet", each=arguments)


def summary(load: Load, samplers: int, times: Mapping[str, list[float]]) -> dict[str, object]:
    """Medians; bytes a second at each sampler; and how many times as long as a copy in memory."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    by_file = middle["write"] + middle["read"]
    return {
        "load": load.name,
        "samplers": samplers,
        "mib": rounded(load.num_bytes / 2**20),
        "meet_ms": rounded(1000 * middle["meet"]),
        "sync_ms": rounded(1000 * middle["sync"]),
        "sync_mib_per_s": rounded(load.num_bytes / 2**20 / middle["sync"]),
        "file_mib_per_s": rounded(load.num_bytes / 2**20 / by_file),
        "copy_mib_per_s": rounded(load.num_bytes / 2**20 / middle["copy"]),
        "sync_to_copy": rounded(middle["sync"] / middle["copy"]),
        "file_to_sync": rounded(by_file / middle["sync"]),
        "load_average": load_average(),
    }


if __name__ == "__main__":
    main()
