"""Reinforcement learning on small sums, several tenants at once, from an empty folder to a plot, on a CPU.

    python examples/arithmetic_rl.py [--seeds 1 2 3] [--steps 150] [--output build/arithmetic_rl]

Makes a tiny Qwen3 model with random weights and starts `twinkle serve` on it. Every tenant, through the official
`tinker` SDK, first learns the form of an answer (its questions come with the answers to other questions), then to add,
from nothing but rewards for right answers. Sums that neither phase trains on are measured beside them. Writes
`arithmetic_rl.jsonl` (the settings, then a line for each step of each tenant) and, where matplotlib is installed,
`arithmetic_rl.png`.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import tinker
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from arithmetic_task import Split, split_problems
from arithmetic_tenant import Plan, StepRecord, Tenant
from demo_stack import DemoError, Stack, interrupt
from twinkle.hub.tiny import make_tiny_model

NUM_HELDOUT = 9
SPLIT_SEED = 0
HIDDEN_SIZE = 64
LAYERS = 1
NAME = "arithmetic_rl"
WATCH_EVERY_S = 1.0
EXIT_INTERRUPTED = 130


class Metrics:
    """The metrics file, written by the threads of all tenants."""

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._started = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")

    def record(self, record: StepRecord) -> None:
        """Appends a step; prints those that were measured on the problems held out."""
        at_s = round(time.monotonic() - self._started, 2)
        with self._lock:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(record), "at_s": at_s}) + "\n")
            if record.heldout_reward is not None:
                facts = f"reward {record.reward:.3f}  held out {record.heldout_reward:.3f}"
                print(f"{at_s:5.0f} s  tenant {record.seed}  step {record.step:3d}  {facts}", flush=True)


def main() -> int:
    """Runs the example; returns the exit code."""
    arguments = parse_arguments()
    # The SDK logs every poll that fails, which is noise once the service has been told to stop.
    logging.getLogger("tinker").setLevel(logging.ERROR)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it bare
    signal.signal(signal.SIGTERM, interrupt)
    metrics_file = arguments.output / f"{NAME}.jsonl"
    try:
        train_tenants(
            arguments.seeds, Plan(steps=arguments.steps), home=arguments.home.absolute(), metrics_file=metrics_file
        )
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been stopped")
        return EXIT_INTERRUPTED
    except DemoError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(f"wrote {metrics_file}")
    plot(metrics_file)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path(".demo/arithmetic"), help="folder for model and service")
    parser.add_argument("--output", type=Path, default=Path("build/arithmetic_rl"), help="folder for metrics and plot")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one tenant is trained for each")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="optimizer steps of reinforcement learning")
    return parser.parse_args()


def train_tenants(seeds: Sequence[int], plan: Plan, *, home: Path, metrics_file: Path) -> None:
    """Makes the model, starts the service and trains a tenant for each seed, all at once.

    Raises:
        DemoError: A tenant failed, or the service did.
    """
    split = split_problems(num_heldout=NUM_HELDOUT, seed=SPLIT_SEED)
    model = make_model(home / "models" / "tiny-qwen3", split)
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {
        "plan": asdict(plan),
        "seeds": list(seeds),
        "model": {"hidden_size": HIDDEN_SIZE, "layers": LAYERS},
        "problems_trained_on": len(split.training),
        "problems_held_out": len(split.heldout),
        "chance": split.chance,
    }
    metrics = Metrics(metrics_file, settings)
    with Stack(model, home / "home", with_flower=False) as stack:
        stack.wait_until_ready()

        def train(seed: int) -> None:
            tenant = Tenant(
                tinker.ServiceClient(base_url=stack.url, api_key=stack.create_key(f"tenant-{seed}")),
                tokenizer,
                base_model=str(model),
                plan=plan,
                split=split,
                seed=seed,
            )
            taught = tenant.learn_format()
            print(f"tenant {seed}: state after the supervised steps {taught}", flush=True)
            print(f"tenant {seed}: final state {tenant.learn_answers(taught, metrics.record)}", flush=True)

        run_at_once(train, seeds, stack)


def make_model(folder: Path, split: Split) -> Path:
    """Makes the tiny base model; its tokenizer has seen the questions trained on and has a token for each digit."""
    texts = [problem.question for problem in split.training]
    return make_tiny_model(folder, texts=texts, hidden_size=HIDDEN_SIZE, layers=LAYERS)


def run_at_once(train: Callable[[int], None], seeds: Sequence[int], stack: Stack) -> None:
    """Runs `train` for every seed in a thread of its own; raises DemoError as soon as one fails, or the service."""
    failures: dict[int, Exception] = {}

    def target(seed: int) -> None:
        try:
            train(seed)
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which reports it
            failures[seed] = error

    # Daemons, so that Ctrl-C does not wait for a long poll to return.
    threads = [threading.Thread(target=target, args=(seed,), name=f"tenant-{seed}", daemon=True) for seed in seeds]
    for thread in threads:
        thread.start()
    while not failures and (running := [thread for thread in threads if thread.is_alive()]):
        running[0].join(WATCH_EVERY_S)
        stack.check_alive()
    for seed, error in failures.items():
        raise DemoError(f"tenant {seed}: {error!r} (see {stack.log_file})") from error


def plot(metrics_file: Path) -> None:
    """Draws the metrics beside their file, if matplotlib is installed."""
    if find_spec("matplotlib") is None:
        print("no plot without matplotlib: pip install matplotlib, then")
        print(f"python examples/arithmetic_plot.py {metrics_file} {metrics_file.with_suffix('.png')}")
        return
    from arithmetic_plot import draw_file  # noqa: PLC0415 - an optional dependency

    print(f"wrote {draw_file(metrics_file, metrics_file.with_suffix('.png'))}")


if __name__ == "__main__":
    sys.exit(main())
