"""The parts of the benchmarks that need no server: who does how much, what is kept, what a table says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def tables() -> ModuleType:
    return importlib.import_module("tables")


@pytest.mark.parametrize(("total", "parts"), [(1, 1), (4, 2), (5, 2), (64, 3), (2, 3)])
def test_work_is_shared_evenly(total: int, parts: int) -> None:
    shares = list(importlib.import_module("sdk_load").shares(total, parts))

    assert sum(shares) == total
    assert len(shares) == parts
    assert max(shares) - min(shares) <= 1


def test_a_window_counts_operations_of_both_kinds_and_cpu_per_operation() -> None:
    load, queue = importlib.import_module("sdk_load"), importlib.import_module("queue_overhead")
    seen = load.Observed(forward_backward=[0.010] * 4, optim_step=[0.020] * 4)

    summary = queue.window_summary(seen, cpu_s={"api": 0.016}, duration_s=2.0)

    assert summary["ops_per_s"] == 4.0
    assert summary["steps_per_s"] == 2.0
    assert summary["operation"]["count"] == 8
    assert summary["cpu_ms_per_op"] == {"api": 2.0}


def test_a_batch_has_shifted_targets_and_is_the_same_every_time() -> None:
    make_batch = importlib.import_module("workload").make_batch
    first, second = (make_batch(num_datums=2, tokens_per_datum=5, vocab_size=50, seed=3) for _ in range(2))

    tokens = first[0].model_input.to_ints()
    targets = first[0].loss_fn_inputs["target_tokens"]
    assert list(targets.data)[:-1] == tokens[1:]
    assert targets.shape == [5]
    assert [datum.model_input.to_ints() for datum in first] == [datum.model_input.to_ints() for datum in second]


def test_the_ratio_is_that_of_neighbouring_steps_not_of_the_medians() -> None:
    step, peft = importlib.import_module("step_overhead"), importlib.import_module("peft_loop")

    def steps(*seconds: float) -> list[object]:
        return [peft.Step(seconds=s, forward_backward_s=s, optim_step_s=0.0, loss=1.0, cpu_s=s) for s in seconds]

    # The machine becomes slower by and by, for both.
    summary = step.size_summary(steps(0.1, 0.2, 0.4, 0.8), steps(0.15, 0.3, 0.6, 1.2))

    assert summary["ratio"] == 1.5
    assert summary["ratio_quartiles"] == [1.5, 1.5]
    assert summary["cpu_ratio"] == 1.5


def test_what_the_service_takes_is_told_in_multiples_of_the_empty_server_of_the_same_round() -> None:
    def window(role: str, cpu_ms: float, p50_ms: float) -> dict[str, object]:
        return {"cpu_ms_per_op": {"client": 9.0, role: cpu_ms}, "operation": {"p50_ms": p50_ms}}

    # The machine is half as fast in the last round.
    ratio = importlib.import_module("measures").to_empty_server(
        [window("api", 1.0, 6.0), window("api", 1.2, 5.0), window("api", 2.0, 12.0)],
        [window("server", 0.5, 4.0), window("server", 0.5, 4.0), window("server", 1.0, 8.0)],
    )

    assert ratio == {"api_cpu": 2.0, "p50": 1.5}


def test_two_loops_that_start_apart_are_not_compared() -> None:
    step, peft = importlib.import_module("step_overhead"), importlib.import_module("peft_loop")

    def first(loss: float) -> list[object]:
        return [peft.Step(seconds=1.0, forward_backward_s=1.0, optim_step_s=0.0, loss=loss)]

    step.check_same_start(first(100.0), first(100.05))
    with pytest.raises(RuntimeError, match="first loss"):
        step.check_same_start(first(100.0), first(101.0))


def test_a_text_lands_between_its_marks_and_nowhere_else(tables: ModuleType) -> None:
    document = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"

    filled = tables.filled(document, {"a": "| new |"})

    assert filled == "before\n<!-- a -->\n| new |\n<!-- /a -->\nafter\n"
    assert tables.filled(filled, {"a": "| new |"}) == filled
    with pytest.raises(ValueError, match="no place for b"):
        tables.filled(document, {"b": ""})


def test_the_readme_shows_the_results_that_are_there(tables: ModuleType) -> None:
    texts = {
        name: render(json.loads(path.read_text()))
        for name, render in tables.RENDERERS.items()
        if (path := BENCHMARKS / "results" / f"{name}.json").exists()
    }
    readme = (BENCHMARKS / "README.md").read_text()

    assert tables.filled(readme, texts) == readme, "run python benchmarks/tables.py"
