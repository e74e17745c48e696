"""Components on the workers of a group: how calls spread, and what comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import twinkle
from twinkle.core.errors import ConfigError, InvalidInput, RankLost
from twinkle.infra import DeviceMesh
from twinkle.infra.device_mesh import current_rank, current_world_size
from twinkle.infra.ray import calls
from twinkle.infra.remote import is_remote, share_workers

pytestmark = pytest.mark.usefixtures("on_ray")

OTHERS = "others"
"""Processes beside those that the script's other objects of a group share."""


def reversed_over(count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """A dispatch of a script's own."""
    return [((args[0][count - 1 - rank],), kwargs) for rank in range(count)]


def by_rank(results: list[dict[str, Any]]) -> dict[int, Any]:
    """A collect rule of a script's own."""
    return {result["rank"]: result["rows"] for result in results}


@twinkle.remote_class()
class Rows:
    """A component of a user's own, that the workers cannot import."""

    def __init__(self, start: int = 0, device_mesh: DeviceMesh | None = None) -> None:
        self.total = start
        self.mesh = device_mesh

    @twinkle.remote_function(dispatch="slice", collect="flatten", lazy_collect=False)
    def even(self, rows: list[int], scale: int = 1) -> list[int]:
        """Each rank its part."""
        return [row * scale for row in rows]

    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def whole(self, rows: list[int]) -> tuple[int, int]:
        """Each rank all."""
        return current_rank(), sum(rows)

    @twinkle.remote_function(dispatch="slice_dp", collect=by_rank, lazy_collect=False)
    def parts(self, inputs: list[int], **others: Any) -> dict[str, Any]:
        """Each data rank its rows, and what belongs to them."""
        return {"rank": current_rank(), "rows": [inputs, others]}

    @twinkle.remote_function(dispatch=reversed_over, collect="none", lazy_collect=False)
    def chosen(self, row: int) -> int:
        """Each rank what the script's function says."""
        return row

    @twinkle.remote_function(dispatch="all", collect="mean", lazy_collect=False)
    def mean(self) -> float:
        """One number of all."""
        return float(current_rank())

    @twinkle.remote_function(dispatch="all", collect="sum")
    def add(self, number: int) -> int:
        """Adds on every rank."""
        self.total += number
        return self.total

    @twinkle.remote_function(dispatch="all", collect="sum", sync=True)
    def add_and_wait(self, number: int) -> int:
        """The same, and the call waits."""
        self.total += number
        return self.total

    @twinkle.remote_function(dispatch="all", execute="first", lazy_collect=False)
    def first(self) -> int:
        """On the first rank."""
        return current_rank()

    @twinkle.remote_function(dispatch="all", collect="first", lazy_collect=False)
    def of_first(self) -> int:
        """On all, and one result."""
        return current_rank()

    @twinkle.remote_function(dispatch="all", collect="last_pp", lazy_collect=False)
    def last(self) -> int:
        """On all, of the last stage the results."""
        return current_rank()

    @twinkle.remote_function(dispatch="all", collect="last_pp_first", lazy_collect=False)
    def first_of_last(self) -> int:
        """On all, the result of one."""
        return current_rank()

    @twinkle.remote_function(execute="first", dispatch="all", lazy_collect=False)
    def count_up(self, end: int) -> Iterator[int]:
        """An iterator, which stays where it is."""
        for number in range(end):
            self.total += 1
            yield number

    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def tensors(self, values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors, changed in place."""
        for value in values.values():
            value.add_(1)
        return values["a"], values["b"]

    @twinkle.remote_function(dispatch="all", execute="peer", lazy_collect=False)
    def facing(self, rows: list[int]) -> tuple[int, list[int]]:
        """On the ranks that face the caller."""
        return current_rank(), rows

    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def world(self) -> tuple[int, int, int, str, float]:
        """What a rank is."""
        gathered = torch.tensor([float(current_rank())])
        torch.distributed.all_reduce(gathered)
        return current_rank(), current_world_size(), torch.distributed.get_world_size(), os.getcwd(), float(gathered)

    @twinkle.remote_function(dispatch="all")
    def fail(self, rank: int) -> None:
        """Raises on one rank."""
        if current_rank() == rank:
            raise InvalidInput("row", "is odd")

    @twinkle.remote_function(dispatch="all", timeout=0.01, lazy_collect=False)
    def hang(self) -> None:
        """Waits for what never comes."""
        threading.Event().wait()

    @twinkle.remote_function(dispatch="all", lazy_collect=False)
    def stay(self) -> None:
        """The same, and the call has no limit."""
        threading.Event().wait()

    def add_twice(self, number: int) -> int:
        """Not marked: made of calls that are."""
        self.add(number)
        return self.add(number)()

    def peek(self) -> int:
        """Not marked, and wants what is elsewhere."""
        return self.total


@pytest.fixture(scope="module")
def rows(cluster: object) -> Rows:
    """On both ranks of a group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twinkle.infra.runtime._this_process, "_runtime", cluster)
        return Rows(start=10, remote_group="model")


def test_a_call_is_cut_evenly_or_whole_or_as_a_function_says(rows: Rows) -> None:
    assert isinstance(rows, Rows) and is_remote(rows) and type(rows).__name__ == "Rows"

    assert rows.even([1, 2, 3, 4, 5], scale=2) == [2, 4, 6, 8, 10]
    assert rows.whole([1, 2]) == [(0, 3), (1, 3)]
    assert rows.chosen(["a", "b"]) == ["b", "a"]


def test_rows_are_cut_over_data_ranks_with_all_that_is_as_long(rows: Rows) -> None:
    found = rows.parts(
        inputs=[1, 2, 3],
        old=torch.arange(3),
        outputs={"logps": np.arange(6).reshape(3, 2), "loss": 1.0},
        names="abc",
        n=[1],
    )

    assert [found[rank][0] for rank in (0, 1)] == [[1], [2, 3]]
    assert found[1][1]["old"].tolist() == [1, 2] and found[1][1]["outputs"]["logps"].tolist() == [[2, 3], [4, 5]]
    assert found[0][1]["outputs"]["loss"] == 1.0 and found[0][1]["names"] == "abc" and found[0][1]["n"] == [1]


@pytest.mark.parametrize(("inputs", "problem"), [([1], "1 rows cannot be spread over 2"), ({"a": [1]}, "is one dict")])
def test_too_few_rows_are_refused_before_anything_runs(rows: Rows, inputs: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        rows.parts(inputs)


def test_results_become_one_by_every_rule(rows: Rows) -> None:
    assert rows.mean() == 0.5
    assert rows.first() == 0
    assert rows.of_first() == 0
    assert rows.last() == [0, 1]
    assert rows.first_of_last() == 0


def test_of_a_mesh_with_stages_the_last_one_answers_and_all_ranks_get_the_rows() -> None:
    staged = Rows(remote_group="model", device_mesh=DeviceMesh.from_sizes(pp_size=2))

    assert staged.last() == [1]
    assert staged.first_of_last() == 1
    assert staged.parts([1, 2])[1][0] == [1, 2]


def test_a_result_is_waited_for_when_it_is_called_or_passed_on(rows: Rows) -> None:
    fresh = Rows(start=1, remote_group="model")

    first = fresh.add(1)
    second = fresh.add(first)

    assert callable(first) and first() == 4
    assert second() == 12 and second() == 12
    assert fresh.add_and_wait(0)() == 12
    assert fresh.add_twice(1) == 16


def test_what_is_not_marked_cannot_see_the_state(rows: Rows) -> None:
    with pytest.raises(AttributeError, match=r"'total'.*marked with remote_function"):
        rows.peek()


def test_an_iterator_stays_on_its_worker_and_gives_one_item_at_a_time() -> None:
    fresh = Rows(remote_group="model")

    numbers = fresh.count_up(3)

    assert next(numbers) == 0
    assert fresh.add(0)() == 1
    assert list(numbers) == [1, 2]


def test_tensors_travel_with_their_dtype_and_may_be_written_to(rows: Rows) -> None:
    values = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.empty(0, 2)}

    (a, b), _ = rows.tensors(values)
    a.add_(1)

    assert a.dtype == torch.bfloat16 and a.tolist() == [2, 2, 2] and b.shape == (0, 2)
    assert values["a"].sum() == 0


def test_the_ranks_of_a_group_are_a_world_as_under_torchrun(rows: Rows) -> None:
    assert rows.world() == [(0, 2, 2, os.getcwd(), 1.0), (1, 2, 2, os.getcwd(), 1.0)]


def test_what_a_rank_raises_is_raised_in_the_script_with_its_place(rows: Rows) -> None:
    with pytest.raises(InvalidInput, match="row: is odd") as raised:
        rows.fail(1)()
    assert any("rank 1" in note and "Rows.fail" in note and "'model'" in note for note in raised.value.__notes__)
    assert rows.mean() == 0.5


def test_what_nobody_waited_for_is_raised_by_a_later_call(rows: Rows) -> None:
    rows.fail(0)

    with pytest.raises(InvalidInput, match="row: is odd"):
        rows.mean()
    assert rows.mean() == 0.5


def test_a_component_on_the_first_worker_alone() -> None:
    @twinkle.remote_class(execute="first")
    class One:
        @twinkle.remote_function(collect="none", lazy_collect=False)
        def rank(self) -> int:
            return current_rank()

    assert One(remote_group="model").rank() == [0]


def test_a_component_given_to_another_is_called_by_its_ranks() -> None:
    @twinkle.remote_class()
    class Caller:
        @twinkle.remote_function(dispatch="all", lazy_collect=False)
        def ask(self, other: Rows) -> list[int]:
            return other.whole([current_rank()])

    caller = Caller(remote_group="model")
    near, far = Rows(remote_group="model"), Rows(remote_group="sampler")

    assert caller.ask(far) == [[(0, 0)], [(0, 1)]]
    # Passed to the workers that hold it, it is the object itself.
    assert caller.ask(near) == [(0, 0), (1, 1)]
    assert share_workers(caller, near) and not share_workers(caller, far) and not share_workers(near, object())


def test_ranks_of_two_groups_call_those_of_the_other_that_face_them_and_a_script_calls_all() -> None:
    @twinkle.remote_class()
    class Asking:
        @twinkle.remote_function(dispatch="all", lazy_collect=False)
        def ask(self, other: Rows) -> list[tuple[int, list[int]]]:
            return other.facing([current_rank()])

    many, few = Rows(remote_group="model", instance_id=OTHERS), Rows(remote_group="sampler")
    two, one = Asking(remote_group="model"), Asking(remote_group="sampler")

    assert two.ask(many) == [[(0, [0])], [(1, [1])]]
    assert two.ask(few) == [[(0, [0])], [(0, [1])]]
    assert one.ask(many) == [[(0, [0]), (1, [0])]]
    assert many.facing([7]) == [(0, [7]), (1, [7])]


def test_a_call_that_takes_longer_than_its_mark_says_ends_the_workers_that_never_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "patience_s", lambda taken_s: 0.1)
    waiting = Rows(remote_group="model", instance_id="late")

    with pytest.raises(TimeoutError, match=r"Rows\.hang on group 'model': ranks \[0, 1\] have not .* within 0\.01 s"):
        waiting.hang()
    with pytest.raises(RankLost, match=r"Rows\.hang was called: .* ranks \[0, 1\] had not ended 0 s later"):
        waiting.mean()
    with pytest.raises(RankLost, match=r"cannot run: Rows\.hang was called"):
        Rows(remote_group="model", instance_id="late")


class _Interrupted(BaseException):
    """What a handler raises."""


def test_what_the_handler_of_a_signal_raises_ends_a_wait_for_workers() -> None:
    waiting = Rows(remote_group="sampler", instance_id="waiting")

    def ring(*_: object) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGUSR2, ring)
    rings = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    try:
        rings.start()
        with pytest.raises(_Interrupted):
            waiting.stay()
    finally:
        rings.join()
        signal.signal(signal.SIGUSR2, before)


def test_a_wrong_group_or_mesh_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'nobody' is no group.*model, sampler"):
        Rows(remote_group="nobody")
    with pytest.raises(ConfigError, match=r"4 ranks \(dp 4\), but group 'model' has 2 workers"):
        Rows(remote_group="model", device_mesh=DeviceMesh.from_sizes(dp_size=4))


def test_an_instance_of_its_own_has_processes_of_its_own(rows: Rows) -> None:
    other = Rows(remote_group="sampler", instance_id="second")
    drawing = twinkle.get_device_placement()

    assert other.whole([1]) == [(0, 1)]
    assert "group model: 2 workers on cpu (for want of others); holds Rows" in drawing
    assert "rank 0 of second: node" in drawing
