"""From single latencies to the numbers that are written down. Pure arithmetic, no clocks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PERCENTILES = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least ``percent`` of the values do not exceed (nearest rank).

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("no values, no percentile")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def latency_summary(latencies_s: Sequence[float]) -> dict[str, float]:
    """Returns count, mean and percentiles in milliseconds."""
    summary: dict[str, float] = {"count": len(latencies_s)}
    if latencies_s:
        summary["mean_ms"] = rounded(1000 * statistics.fmean(latencies_s))
        for percent in PERCENTILES:
            summary[f"p{percent}_ms"] = rounded(1000 * percentile(latencies_s, percent))
    return summary


def median_of(rounds: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Returns the median of each number over rounds that have the same shape, nested mappings included."""
    middle: dict[str, object] = {}
    for key, first in rounds[0].items():
        values = [one_round[key] for one_round in rounds if key in one_round]
        if isinstance(first, Mapping):
            middle[key] = median_of([value for value in values if isinstance(value, Mapping)])
        elif isinstance(first, (int, float)) and not isinstance(first, bool):
            middle[key] = rounded(statistics.median([value for value in values if isinstance(value, (int, float))]))
    return middle


def to_empty_server(served: Sequence[Mapping[str, Any]], empty: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns what the service takes as multiples of the empty server beside it: the median over their rounds.

    Both take their turns in each round, so that how fast the machine is just then cuts out. An empty server has one
    process; the service's API stands against it, and latencies stand against latencies.

    Args:
        served: The service's windows, in the order of the rounds.
        empty: Those of the empty server under the same load.
    """
    rounds = list(zip(served, empty, strict=True))
    cpu = [ours["cpu_ms_per_op"]["api"] / floor["cpu_ms_per_op"]["server"] for ours, floor in rounds]
    p50 = [ours["operation"]["p50_ms"] / floor["operation"]["p50_ms"] for ours, floor in rounds]
    return {"api_cpu": rounded(statistics.median(cpu)), "p50": rounded(statistics.median(p50))}


def rounded(value: float) -> float:
    """Returns four significant digits: more would pretend a precision that a shared machine does not have."""
    return float(f"{value:.4g}")
