"""The parts of the fusion benchmark that run no model: what is compared with what, which goals are said to be met."""

from __future__ import annotations

import importlib
import statistics
from types import ModuleType

import pytest


@pytest.fixture
def fusion() -> ModuleType:
    return importlib.import_module("fusion")


def passes(fusion: ModuleType, *cpu_s: float) -> list[object]:
    return [fusion.Pass(wall_s=2 * seconds, cpu_s=seconds, loss=1.0) for seconds in cpu_s]


def cell(tenants: int, tokens: int, *, peft: float, limit: float) -> dict[str, object]:
    return {"tenants": tenants, "tokens": tokens, "fused_against": {"peft_switching": peft, "limit": limit}}


def test_every_tenant_count_meets_every_length_and_adapters_only_ever_grow(fusion: ModuleType) -> None:
    loads = fusion.cell_loads(short=False)

    assert len({(load.tenants, load.tokens) for load in loads}) == len(loads) == 18
    assert [load.tenants for load in loads] == sorted(load.tenants for load in loads)


def test_small_loads_run_more_often_than_large_ones(fusion: ModuleType) -> None:
    rounds = [fusion.rounds_of(fusion.Load(tenants=32, tokens=tokens), short=False) for tokens in (8, 32, 512)]

    assert rounds == sorted(rounds, reverse=True)
    assert rounds[-1] >= 3


@pytest.mark.parametrize("tenants", [1, 2, 4, 8, 16, 32])
def test_the_limit_does_the_arithmetic_of_the_tenants_it_stands_for(fusion: ModuleType, tenants: int) -> None:
    ranks = [fusion.RANKS[number % len(fusion.RANKS)] for number in range(tenants)]

    assert statistics.fmean(ranks) == fusion.RANKS[0]


def test_a_cell_compares_neighbours_and_counts_the_tokens_of_all(fusion: ModuleType) -> None:
    slower_machine = (1.0, 2.0, 4.0)
    times = {way: passes(fusion, *slower_machine) for way in fusion.WAYS}
    times["peft_switching"] = passes(fusion, *(3 * seconds for seconds in slower_machine))

    summary = fusion.cell_summary(fusion.Load(tenants=4, tokens=32), times)

    assert summary["tokens_per_cpu_s"]["fused"] == 4 * 32 / 2.0
    assert summary["tokens_per_s"]["fused"] == 4 * 32 / 4.0
    assert summary["fused_against"]["peft_switching"] == 3.0
    assert summary["fused_against"]["limit"] == 1.0


def test_ways_with_unlike_losses_are_not_compared(fusion: ModuleType) -> None:
    losses = dict.fromkeys(fusion.WAYS, 100.0)

    fusion.check_same_loss({**losses, "fused": 100.05})
    with pytest.raises(RuntimeError, match="fused"):
        fusion.check_same_loss({**losses, "fused": 101.0})


def test_a_goal_names_the_cells_that_miss_it(fusion: ModuleType) -> None:
    cells = [
        cell(1, 32, peft=0.97, limit=1.0),
        cell(2, 32, peft=1.8, limit=0.95),
        cell(4, 32, peft=2.6, limit=0.85),
        cell(4, 128, peft=1.3, limit=0.92),
    ]

    goals = fusion.goals_of(cells, [])

    assert goals["peft_32"]["missed_at"] == ["2 x 32"]
    assert goals["peft_32"]["best"] == 2.6
    assert goals["peft_128_on"]["missed_at"] == []
    assert goals["limit"]["missed_at"] == ["4 x 32"]
    assert goals["single"]["missed_at"] == []
    assert goals["peft_any"]["worst"] == 1.3
    assert "exactness" not in goals


def test_exactness_is_judged_by_the_strict_mode_alone(fusion: ModuleType) -> None:
    rows = [
        {"tenants": 16, "tokens": 32, "mode": mode, "of_none": of_none}
        for mode, of_none in (("strict", 0.95), ("tiled", 0.6), ("none", 1.0))
    ]

    assert fusion.goals_of([], rows)["exactness"]["missed_at"] == []
