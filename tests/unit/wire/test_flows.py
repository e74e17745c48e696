"""Flows: their order, their references, and what is refused."""

from __future__ import annotations

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.jobs_flow import Condition, FlowSpec
from twinkle.wire.flows import FlowStep, steps_of
from twinkle.wire.references import Spec, bound, jobs_referred_to, references_in, resolved


def flow(**jobs: dict[str, object]) -> FlowSpec:
    return FlowSpec.model_validate({"jobs": {name: {"kind": "sft", "spec": {}, **job} for name, job in jobs.items()}})


def steps(**jobs: dict[str, object]) -> list[FlowStep]:
    return steps_of(flow(**jobs))


def test_each_job_stands_behind_those_it_waits_for() -> None:
    found = steps(export={"after": {"best": "ok"}}, best={"after": {"left": "ok", "right": "any"}}, left={}, right={})
    assert [step.name for step in found] == ["left", "right", "best", "export"]
    assert found[2].after == {"left": Condition.OK, "right": Condition.ANY}


def test_a_reference_makes_a_job_wait_for_the_other_to_end_well() -> None:
    found = steps(evaluate={"spec": {"model": "${train.result.checkpoint}"}, "after": {"train": "any"}}, train={})
    assert [step.name for step in found] == ["train", "evaluate"]
    assert found[1].after == {"train": Condition.OK}


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidInput, match=r"jobs\.a\.after: the flow has no job 'trian'; did you mean 'train'\?"):
        steps(a={"after": {"trian": "ok"}}, train={})
    with pytest.raises(InvalidInput, match=r"jobs\.a\.spec\.model: the flow has no job 'trian'; did you mean 'train'"):
        steps(a={"spec": {"model": "${trian.result.checkpoint}"}}, train={})


def test_a_circle_is_refused_and_shown() -> None:
    with pytest.raises(InvalidInput, match="in a circle: a after c after b after a"):
        steps(a={"after": {"c": "ok"}}, b={"after": {"a": "ok"}}, c={"spec": {"x": "${b.result.y}"}})
    with pytest.raises(InvalidInput, match="in a circle: a after a"):
        steps(a={"after": {"a": "any"}})


def test_a_whole_value_takes_the_type_of_what_it_refers_to_and_a_part_becomes_text() -> None:
    spec: Spec = {
        "model": "${j1.result.checkpoint}",
        "steps": "${j1.result.steps}",
        "nested": [{"name": "best of ${j2.id}: ${j2.best.parameters.rank}"}],
        "values": "${j2.result.values}",
        "first": "${j2.result.values.0}",
    }
    results: dict[str, Spec] = {
        "j1": {"checkpoint": "tinker://x", "steps": 12},
        "j2": {"best": {"parameters": {"rank": 8}}, "values": [1, 2]},
    }
    assert resolved(spec, results) == {
        "model": "tinker://x",
        "steps": 12,
        "nested": [{"name": "best of j2: 8"}],
        "values": [1, 2],
        "first": 1,
    }


def test_what_a_result_says_is_data_and_never_looked_into_again() -> None:
    results: dict[str, Spec] = {"j1": {"text": "${j2.result.secret}"}, "j2": {"secret": "x"}}
    assert resolved({"a": "${j1.result.text}", "b": "<${j1.result.text}>"}, results) == {
        "a": "${j2.result.secret}",
        "b": "<${j2.result.secret}>",
    }


def test_names_become_ids_once_and_what_only_looks_like_a_reference_is_left_alone() -> None:
    stored = bound({"model": "${train.best.checkpoint}", "prompt": "costs $${price.total}"}, {"train": "id-1"})
    assert stored == {"model": "${id-1.best.checkpoint}", "prompt": "costs ${price.total}"}
    assert jobs_referred_to(stored, ["id-1", "id-2"]) == {"id-1"}
    results: dict[str, Spec] = {"id-1": {"best": {"checkpoint": "tinker://best"}}}
    assert resolved(stored, results) == {"model": "tinker://best", "prompt": "costs ${price.total}"}


def test_a_field_that_a_result_does_not_have_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidInput, match=r"the job's result has no 'chekpoint'; did you mean 'checkpoint'\?"):
        resolved({"model": "${j.result.chekpoint}"}, {"j": {"checkpoint": "tinker://x"}})


@pytest.mark.parametrize("wrong", ["${train}", "${}", "${train.}", "${train.result..x}"])
def test_a_reference_that_says_too_little_is_refused_with_one_that_does_not(wrong: str) -> None:
    with pytest.raises(InvalidInput, match=r"write \$\{name\.result\.checkpoint\}"):
        list(references_in({"model": wrong}))


def test_a_reference_to_nothing_a_job_has_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"a job has no 'reslut'; did you mean 'result'\?"):
        list(references_in({"model": "${train.reslut.checkpoint}"}))
