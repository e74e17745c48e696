"""What a job would take, before any of it is done: tokens and steps exactly, memory from the model, time from the mesh.

The time is a range, of the clock. Its lower end is the job alone on a device that is as quick as it was for the quicker
part of the last operations; the upper end is one as slow as for the slower part, shared evenly with everybody who has
work now. Samples that are drawn side by side share the time, as they did lately; the price counts it for each of them,
as the account does. What costs the same however many tokens there are (an adapter's beginning, a checkpoint, weights
that are opened for sampling) counts as often as it comes; which of it was never measured is told, ``not_counted``.
How long answers get nobody knows before they are drawn: what depends on that is a range too, from answers of one token
to answers of as many as they may have.
Nothing is made up: where nothing was measured there is no time, and the estimate says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twinkle.core.adapter_sizes import FLOAT_BYTES, AdapterSizes
from twinkle.core.operation import OperationKind
from twinkle.storage.journal.speeds import Measured, ModelFacts

BYTES_PER_GIGABYTE = 10**9
HOUR_S = 3600.0
_FEWEST_MEASURED = 3
"""Fewer operations say nothing about the next ones."""
_QUICK, _SLOW = 0.25, 0.75
_PARTS = 16
"""Into so many is the time cut in which samples were drawn."""


@dataclass(frozen=True)
class AdapterShape:
    """What of a model an adapter trains, and its rank."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """How many of each sort."""

    trained: int = 0
    forwarded: int = 0
    prefilled: int = 0
    drawn: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Work:
    """All that a job will have a mesh do, as its plan reckons it.

    Args:
        base_model: On which model.
        num_trained: Tokens of forward and backward passes, all epochs together.
        num_forwarded: Tokens that go through the model forward alone: evaluations, a reference's log-probabilities.
        num_prefilled: Tokens of prompts.
        num_drawn: Tokens drawn; where they may end earlier, at most.
        least: The same four counts if every answer ends at once; by default answers alone are that short.
        num_steps: Of the optimizer.
        num_samples: Sequences drawn.
        adapter: What is trained; nothing where a job only samples.
        num_kept_with_optimizer: Checkpoints that stay with the optimizer's state.
        num_kept: Those that stay without.
        stored_bytes: What else stays.
        around: How many operations there are whose time does not grow with tokens: beginnings, saves, weights that are
            opened for sampling.
        elsewhere: What other models do for it: a teacher, the other models of a batch.
        details: What else its owner wants to know of it.
    """

    base_model: str
    num_trained: int = 0
    num_forwarded: int = 0
    num_prefilled: int = 0
    num_drawn: int = 0
    least: Tokens | None = None
    num_steps: int = 0
    num_samples: int = 0
    adapter: AdapterShape | None = None
    num_kept_with_optimizer: int = 0
    num_kept: int = 0
    stored_bytes: int = 0
    around: Mapping[OperationKind, int] = field(default_factory=dict)
    elsewhere: tuple[Work, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def most(self) -> Tokens:
        """All four counts, with answers as long as they may be."""
        return Tokens(
            trained=self.num_trained, forwarded=self.num_forwarded, prefilled=self.num_prefilled, drawn=self.num_drawn
        )

    @property
    def fewest(self) -> Tokens:
        """All four, with answers that end at once."""
        return self.least or replace(self.most, drawn=0)


@dataclass(frozen=True, kw_only=True)
class Range:
    """From the least to the most that is to be expected."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        return Range(low=self.low + other.low, high=self.high + other.high)


NOTHING = Range(low=0.0, high=0.0)


def estimate_of(work: Work, facts: ModelFacts, *, elsewhere: Sequence[ModelFacts] = ()) -> dict[str, Any]:
    """The estimate as the job's result tells it; ``elsewhere`` are the facts of the work's other models, in order."""
    both = [(work, facts), *zip(work.elsewhere, elsewhere, strict=True)]
    times = [_time(one, known) for one, known in both]
    most, fewest = _summed([one.most for one, _ in both]), _summed([one.fewest for one, _ in both])
    return {
        "tokens": told_tokens(most, fewest),
        "steps": work.num_steps,
        "around": {kind.value: number for kind, number in work.around.items() if number},
        **work.details,
        "memory": _memory(work.adapter, facts.sizes),
        "storage": _storage(work, facts.sizes),
        "time": _summed_times(times),
        "price": _price(most, [device_seconds(one, known.measured)[0] for one, known in both], work, facts.sizes),
    }


def told_tokens(most: Tokens, fewest: Tokens) -> dict[str, Any]:
    """Counts as a result tells them: at most, and where they depend on what is drawn, ``..._least`` beside them."""
    told: dict[str, Any] = dict(vars(most))
    told |= {f"{name}_least": least for name, least in vars(fewest).items() if least != told[name]}
    return {**told, "drawn_is_exact": most.drawn == fewest.drawn}


def sum_of_estimates(estimates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several estimates together, as if one job came after the other; on a mesh that fuses them it is less."""
    names = tuple(vars(Tokens()))
    most = {name: sum(one["tokens"][name] for one in estimates) for name in names}
    fewest = {name: sum(one["tokens"].get(f"{name}_least", one["tokens"][name]) for one in estimates) for name in names}
    stored = [one["storage"]["size_bytes"] for one in estimates if one["storage"] is not None]
    return {
        "jobs": len(estimates),
        "tokens": told_tokens(Tokens(**most), Tokens(**fewest)),
        "steps": sum(one["steps"] for one in estimates),
        "storage": {"size_bytes": sum(stored)},
        "time": _summed_times([one["time"] for one in estimates]),
    }


def _summed(counts: Sequence[Tokens]) -> Tokens:
    return sum(counts[1:], counts[0])


def _summed_times(times: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One after the other; where one of them is not known, the sum is not."""
    if len(times) == 1:
        return dict(times[0])
    reasons = [time["reason"] for time in times if "reason" in time]
    if reasons:
        return {"reason": reasons[0]}
    told: dict[str, Any] = {name: round(sum(time[name] for time in times), 3) for name in ("low_s", "high_s")}
    unknown: Counter[str] = Counter()
    for time in times:
        unknown.update(time.get("not_counted", {}))
    return {**told, "not_counted": dict(unknown)} if unknown else told


def device_seconds(
    work: Work, measured: Sequence[Measured], *, side_by_side: bool = False
) -> tuple[Range | None, list[str]]:
    """What the device will take for all of it, and the kinds of work of which nothing was measured.

    Args:
        work: What is to be done.
        measured: What was done lately.
        side_by_side: Whether time that samples have shared counts once, as by the clock; else once for each of them, as
            the account does.
    """
    drawing = _per_token_together(measured) if side_by_side else _per_token(measured, {OperationKind.SAMPLE})
    missing: list[str] = []
    total = NOTHING
    most, least, steps = work.most, work.fewest, work.num_steps
    for label, fewest, amount, found in (
        ("training", least.trained, most.trained, _per_token(measured, {OperationKind.FORWARD_BACKWARD})),
        ("forward passes", least.forwarded, most.forwarded, _per_forwarded_token(measured)),
        (
            "sampling",
            least.prefilled + least.drawn,
            most.prefilled + most.drawn,
            drawing,
        ),
        ("optimizer steps", steps, steps, _per_operation(measured, OperationKind.OPTIM_STEP)),
    ):
        if not amount:
            continue
        if found is None:
            missing.append(label)
        else:
            total = total + Range(low=found.low * fewest, high=found.high * amount)
    for kind, number in work.around.items():
        once = _per_operation(measured, kind, by_clock=side_by_side, fewest=1) or NOTHING
        total = total + Range(low=once.low * number, high=once.high * number)
    return (None if missing else total), missing


def _per_forwarded_token(measured: Sequence[Measured]) -> Range | None:
    """A pass forward alone: as measured, else from a third of a training pass (it has no backward) to all of it."""
    found = _per_token(measured, {OperationKind.FORWARD})
    trained = _per_token(measured, {OperationKind.FORWARD_BACKWARD})
    return found or (None if trained is None else Range(low=trained.low / 3, high=trained.high))


def _per_token(measured: Iterable[Measured], kinds: set[OperationKind]) -> Range | None:
    """Seconds of the device for a token, each operation weighing as much as it has tokens."""
    rates = sorted(
        (one.device_s / one.num_tokens, one.num_tokens) for one in measured if one.kind in kinds and one.num_tokens > 0
    )
    return _quartiles(rates)


def _per_token_together(measured: Iterable[Measured]) -> Range | None:
    """Seconds of the clock for a token of samples, however many were drawn side by side.

    The time in which any was drawn is cut into equal parts, and each sample's tokens are spread over its own time.
    """
    samples = [one for one in measured if one.kind is OperationKind.SAMPLE and one.num_tokens > 0]
    if len(samples) < _FEWEST_MEASURED:
        return None
    stretches = _busy([(one.started_at, one.finished_at) for one in samples])
    busy_s = sum(end - start for start, end in stretches)
    if busy_s <= 0:
        return NOTHING
    tokens = [0.0] * _PARTS
    for one in samples:
        first, last = (_busy_until(stretches, at) / busy_s * _PARTS for at in (one.started_at, one.finished_at))
        for part in range(_PARTS):
            within = min(last, part + 1) - max(first, part)
            if last > first and within > 0:
                tokens[part] += one.num_tokens * within / (last - first)
    return _spread([(busy_s / _PARTS / num, num) for num in tokens if num > 0])


def _busy(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches of time in which there was anything, in their order."""
    stretches: list[tuple[float, float]] = []
    for start, end in sorted(times):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        else:
            stretches.append((start, end))
    return stretches


def _busy_until(stretches: Sequence[tuple[float, float]], moment: float) -> float:
    return sum(min(end, moment) - start for start, end in stretches if start < moment)


def _per_operation(
    measured: Iterable[Measured], kind: OperationKind, *, by_clock: bool = False, fewest: int = _FEWEST_MEASURED
) -> Range | None:
    """Seconds of an operation: of the device, or from its begin to its end, with what it waits for the object store."""
    times = [one.finished_at - one.started_at if by_clock else one.device_s for one in measured if one.kind is kind]
    return _quartiles([(time_s, 1) for time_s in times], fewest=fewest)


def _quartiles(weighed: Sequence[tuple[float, float]], *, fewest: int = _FEWEST_MEASURED) -> Range | None:
    return None if len(weighed) < fewest else _spread(weighed)


def _spread(weighed: Sequence[tuple[float, float]]) -> Range:
    in_order = sorted(weighed)
    return Range(low=_quantile(in_order, _QUICK), high=_quantile(in_order, _SLOW))


def _quantile(weighed: Sequence[tuple[float, float]], share: float) -> float:
    wanted = share * sum(weight for _, weight in weighed)
    reached = 0.0
    for value, weight in weighed:
        reached += weight
        if reached >= wanted:
            return value
    return weighed[-1][0]


def _memory(adapter: AdapterShape | None, sizes: AdapterSizes | None) -> dict[str, Any] | None:
    """On the device while it trains; the base model is shared with everybody and counts for nobody."""
    if adapter is None:
        return None
    if sizes is None:
        return {"reason": "the mesh does not say how large adapters on its model are"}
    num_parameters = num_parameters_of(adapter, sizes)
    weights, copy = num_parameters * FLOAT_BYTES, num_parameters * sizes.copy_bytes
    return {
        "adapter_parameters": num_parameters,
        "weights_bytes": weights + copy,
        "gradients_bytes": weights,
        "optimizer_bytes": 2 * weights,
        "total_bytes": sizes.trained_bytes(num_parameters),
    }


def num_parameters_of(adapter: AdapterShape, sizes: AdapterSizes) -> int:
    """Of an adapter on the model whose sizes these are."""
    return sizes.num_parameters(
        adapter.rank,
        train_attn=adapter.train_attn,
        train_mlp=adapter.train_mlp,
        train_unembed=adapter.train_unembed,
    )


def _storage(work: Work, sizes: AdapterSizes | None) -> dict[str, Any] | None:
    """In the object store when it has ended; files' headers come on top, some kilobytes each."""
    size_bytes = _stored_bytes(work, sizes)
    if size_bytes is None:
        return None
    return {"checkpoints": work.num_kept + work.num_kept_with_optimizer, "size_bytes": size_bytes}


def _stored_bytes(work: Work, sizes: AdapterSizes | None) -> int | None:
    if not work.num_kept + work.num_kept_with_optimizer:
        return work.stored_bytes
    if work.adapter is None or sizes is None:
        return None
    weights = num_parameters_of(work.adapter, sizes) * FLOAT_BYTES
    return weights * work.num_kept + 3 * weights * work.num_kept_with_optimizer + work.stored_bytes


def _time(work: Work, facts: ModelFacts) -> dict[str, Any]:
    if work.most == Tokens() and not work.num_steps:
        return {"reason": "it asks nothing of a device: files alone are read and written"}
    device_s, missing = device_seconds(work, facts.measured, side_by_side=True)
    if device_s is None:
        return {
            "reason": f"no measurement of {' and '.join(missing)} on this mesh yet; it is there after"
            f" {_FEWEST_MEASURED} operations of the kind"
        }
    told = {
        "low_s": round(device_s.low, 3),
        "high_s": round(device_s.high * (1 + facts.num_others), 3),
        "measured_operations": len(facts.measured),
        "tenants_beside": facts.num_others,
    }
    known = {one.kind for one in facts.measured}
    unknown = {kind.value: number for kind, number in work.around.items() if number and kind not in known}
    return {**told, "not_counted": unknown} if unknown else told


def _price(most: Tokens, device_s: Sequence[Range | None], work: Work, sizes: AdapterSizes | None) -> dict[str, Any]:
    """In what the tenant's account counts at most: tokens, device seconds, gigabyte-hours for each hour it stays."""
    size_bytes = _stored_bytes(work, sizes)
    known = [one for one in device_s if one is not None]
    total = sum(known, NOTHING)
    return {
        "training_tokens": most.trained + most.forwarded,
        "prefill_tokens": most.prefilled,
        "sample_tokens": most.drawn,
        "device_seconds": [round(total.low, 3), round(total.high, 3)] if len(known) == len(device_s) else None,
        "gigabyte_hours_per_hour": None if size_bytes is None else size_bytes / BYTES_PER_GIGABYTE,
    }
