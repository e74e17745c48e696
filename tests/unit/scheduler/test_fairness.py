"""Shares over time: a mesh in small, with tenants that always have work and devices that take what is chosen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.heads import head, turn
from twinkle.core.operation import OperationKind
from twinkle.scheduler.fairness import (
    charge_of_time,
    charge_of_tokens,
    in_service_order,
    virtual_time,
    with_virtual_time,
)
from twinkle.scheduler.fusion import choose_batch, choose_samples
from twinkle.storage.journal.turns import Head

_STEPS = 120


@dataclass
class _Mesh:
    """What the journal keeps of shares, for adapters that never run out of operations."""

    num_adapters: dict[str, int]
    weights: dict[str, float]
    sizes: dict[str, int]
    max_adapters: int = 8
    max_tokens: int = 400
    vtimes: Counter[str] = field(default_factory=Counter)  # type: ignore[type-arg]
    lane_vtimes: Counter[str] = field(default_factory=Counter)  # type: ignore[type-arg]
    seqs: Counter[str] = field(default_factory=Counter)  # type: ignore[type-arg]
    served: Counter[str] = field(default_factory=Counter)  # type: ignore[type-arg]
    nice: dict[str, int] = field(default_factory=dict)
    forking: set[str] = field(default_factory=set)
    was_light: bool = False

    def heads(self) -> list[Head]:
        found = []
        for tenant, count in self.num_adapters.items():
            of = turn(tenant, vtime=self.vtimes[tenant], weight=self.weights[tenant])
            for lane in (f"{tenant}-{number}" for number in range(count)):
                kind = self._kind_of(tenant, lane)
                found.append(
                    head(
                        lane,
                        kind,
                        of=of,
                        seq=self.seqs[lane],
                        num_tokens=self.sizes[tenant] if kind is OperationKind.FORWARD_BACKWARD else 0,
                        nice=self.nice.get(lane, 0),
                        vtime=self.lane_vtimes[lane],
                        has_next=True,
                    )
                )
        return found

    def _kind_of(self, tenant: str, lane: str) -> OperationKind:
        if tenant in self.forking:
            return OperationKind.FORK
        return OperationKind.OPTIM_STEP if self.seqs[lane] % 3 == 2 else OperationKind.FORWARD_BACKWARD

    def step(self) -> list[Head]:
        batch = choose_batch(
            self.heads(),
            max_adapters=self.max_adapters,
            max_tokens=self.max_tokens,
            min_tokens=0,
            previous_was_light=self.was_light,
        )
        self.was_light = batch[0].kind is not OperationKind.FORWARD_BACKWARD
        for taken in batch:
            tenant, cost = taken.turn.tenant, charge_of_tokens(taken.num_tokens)
            if tenant in self.forking:
                cost = charge_of_time(0.0, tokens_per_s=0.0, num_replayed=self.sizes[tenant])
            self.vtimes[tenant] += cost / self.weights[tenant]  # type: ignore[assignment]
            self.lane_vtimes[taken.lane] += cost
            self.seqs[taken.lane] += 1
            self.served[tenant] += cost
        return batch


_tenants = st.integers(2, 4).map(lambda count: [f"t{number}" for number in range(count)])


@st.composite
def _meshes(draw: st.DrawFn) -> _Mesh:
    names = draw(_tenants)
    return _Mesh(
        num_adapters={name: draw(st.integers(1, 30)) for name in names},
        weights={name: draw(st.sampled_from([0.5, 1.0, 2.0, 4.0])) for name in names},
        sizes={name: draw(st.integers(1, 300)) for name in names},
    )


@settings(max_examples=60, deadline=None)
@given(_meshes())
def test_busy_tenants_differ_by_no_more_than_one_operation_of_each_and_one_step_of_optimizers(mesh: _Mesh) -> None:
    for _ in range(_STEPS):
        mesh.step()

    for one, other in zip(mesh.weights, list(mesh.weights)[1:], strict=False):
        apart = abs(mesh.served[one] / mesh.weights[one] - mesh.served[other] / mesh.weights[other])
        allowed = sum((mesh.sizes[tenant] + mesh.max_adapters) / mesh.weights[tenant] for tenant in (one, other))
        assert apart <= allowed, (mesh.served, mesh.weights)


@settings(max_examples=60, deadline=None)
@given(_meshes())
def test_nobody_starves_each_adapter_moves_on(mesh: _Mesh) -> None:
    for _ in range(_STEPS * 4):
        mesh.step()

    least = {tenant: min(mesh.seqs[f"{tenant}-{n}"] for n in range(c)) for tenant, c in mesh.num_adapters.items()}
    mean = {tenant: sum(mesh.seqs[f"{tenant}-{n}"] for n in range(c)) / c for tenant, c in mesh.num_adapters.items()}
    assert all(least[tenant] >= mean[tenant] - 3 for tenant in least), (least, mean)


@given(st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_one_operation_behind_another_tenants_thousands_starts_within_two_steps(
    own_size: int, other_size: int, was_light: bool
) -> None:
    mesh = _Mesh({"crowd": 100}, {"crowd": 1.0}, {"crowd": other_size})
    for _ in range(7):
        mesh.step()
    mesh.was_light = was_light
    start = min(head.turn.vtime for head in mesh.heads())
    mesh.num_adapters["late"], mesh.weights["late"], mesh.sizes["late"] = 1, 1.0, own_size
    mesh.vtimes["late"] = start  # type: ignore[assignment]

    taken = [*mesh.step(), *mesh.step()]

    assert "late-0" in [head.lane for head in taken]


@settings(max_examples=60, deadline=None)
@given(
    replayed=st.integers(1, 30_000),
    size=st.integers(1, 300),
    num_forks=st.integers(1, 30),
    num_trained=st.integers(1, 30),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.5, 1.0, 2.0])),
)
def test_one_who_only_forks_gets_no_more_than_one_who_trains(
    replayed: int, size: int, num_forks: int, num_trained: int, weights: tuple[float, float]
) -> None:
    mesh = _Mesh(
        {"forks": num_forks, "trains": num_trained},
        {"forks": weights[0], "trains": weights[1]},
        {"forks": replayed, "trains": size},
        forking={"forks"},
    )
    for _ in range(_STEPS):
        mesh.step()

    apart = abs(mesh.served["forks"] / weights[0] - mesh.served["trains"] / weights[1])
    # What either may be ahead by: one operation, and the trainer the rest of its batch and a step of optimizers.
    allowed = replayed / weights[0] + max(size, mesh.max_tokens) / weights[1] + mesh.max_adapters / weights[1]
    assert apart <= allowed, mesh.served


def test_a_hundred_adapters_get_no_more_than_one() -> None:
    mesh = _Mesh({"many": 100, "one": 1}, {"many": 1.0, "one": 1.0}, {"many": 30, "one": 30})
    for _ in range(300):
        mesh.step()

    assert abs(mesh.served["many"] - mesh.served["one"]) <= 2 * (30 + mesh.max_adapters)


def test_priorities_order_a_tenants_own_adapters_and_nobody_elses() -> None:
    mesh = _Mesh({"a": 3, "b": 3}, {"a": 1.0, "b": 1.0}, {"a": 50, "b": 50}, max_adapters=2)
    mesh.nice = {"a-2": -5}
    for _ in range(60):
        mesh.step()

    assert mesh.seqs["a-2"] > 10 * max(mesh.seqs["a-0"], mesh.seqs["a-1"])
    assert abs(mesh.served["a"] - mesh.served["b"]) <= 2 * (50 + mesh.max_adapters)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=40), st.integers(1, 10))
def test_samples_of_two_lanes_share_a_tenants_room(samples: list[tuple[int, int]], room: int) -> None:
    heads = [
        head(f"s{lane}", OperationKind.SAMPLE, seq=seq, num_tokens=num_tokens)
        for seq, (lane, num_tokens) in enumerate(samples)
    ]

    chosen = choose_samples(heads, room=room, is_idle=True)

    assert len(chosen) == min(room, len(heads))
    if room >= 4:
        assert {one.lane for one in chosen} == {one.lane for one in heads}
    for lane in {one.lane for one in heads}:
        of_lane = [one for one in heads if one.lane == lane]
        taken = [one for one in chosen if one.lane == lane]
        assert taken == of_lane[: len(taken)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), max_size=30))
def test_start_tags_never_run_back_and_nothing_is_lost(operations: list[tuple[str, int]]) -> None:
    turns = {name: turn(name, vtime=vtime) for name, vtime in (("a", 0.0), ("b", 50.0), ("c", 70.0))}
    heads = [head(f"{name}{n}", of=turns[name], num_tokens=size) for n, (name, size) in enumerate(operations)]

    order = in_service_order(heads)

    assert sorted(operation.head.lane for operation in order) == sorted(head.lane for head in heads)
    assert [operation.start for operation in order] == sorted(operation.start for operation in order)


def test_whoever_was_idle_starts_at_the_meshs_virtual_time_and_its_adapter_at_its_tenants() -> None:
    idle, busy = turn("idle", vtime=5, mesh_vtime=40, lane_vtime=9), turn("busy", vtime=50, mesh_vtime=40, lane_vtime=9)
    order = in_service_order(
        [
            head("z-served-less", of=idle, vtime=1, num_tokens=7),
            head("a-served-more", of=idle, vtime=8, num_tokens=3),
            head("other", of=busy, vtime=12),
        ]
    )

    # Both adapters of the idle tenant start where its idle lanes begin, so their names decide and not what they had.
    assert [(one.head.lane, one.start) for one in order] == [
        ("a-served-more", 40),
        ("z-served-less", 43),
        ("other", 50),
    ]


def test_a_lane_whose_samples_run_stands_behind_one_whose_do_not() -> None:
    heads = [
        head("busy", OperationKind.SAMPLE, vtime=1, num_running_tokens=20),
        head("idle", OperationKind.SAMPLE, vtime=20),
    ]

    assert [one.head.lane for one in in_service_order(heads)] == ["idle", "busy"]


@given(st.lists(st.floats(0, 1e6)), st.floats(0, 1e6))
def test_the_virtual_time_is_the_lowest_start_tag_on_offer_and_never_runs_back(
    served: list[float], mesh_vtime: float
) -> None:
    heads = [head(str(n), of=turn(str(n), vtime=vtime, mesh_vtime=mesh_vtime)) for n, vtime in enumerate(served)]

    if heads:
        assert virtual_time(heads) == in_service_order(heads)[0].start == max(min(served), mesh_vtime)
    assert virtual_time([]) == 0


@pytest.mark.parametrize("num_taken", [0, 1])
def test_the_virtual_time_follows_of_all_that_is_offered_whatever_is_taken_of_it(num_taken: int) -> None:
    offered = [head("ahead", of=turn("ahead", vtime=9)), head("behind", of=turn("behind", vtime=3))]

    choice = with_virtual_time(lambda heads: heads[:num_taken])(offered)

    assert (choice.heads, choice.vtime) == (offered[:num_taken], 3)
