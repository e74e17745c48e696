"""Sweeps and flows become jobs: the same ones for the same request, each judged before any is stored."""

from __future__ import annotations

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.core.job import Dependency, JobKind, NewJob
from twinkle.wire.bodies.jobs_base import JobPart, JobSpec
from twinkle.wire.job_groups import expanded, path_of
from twinkle.wire.references import Spec

SFT: Spec = {"model": "base", "data": "file-1"}


def new(kind: JobKind, spec: Spec) -> NewJob:
    return NewJob(id="job-1", tenant="t", kind=kind, spec=spec, digest="d", nice=7, notify_url="https://x")


def sweep(parameters: Spec, template: Spec | None = None, kind: str = "sft", **more: object) -> list[NewJob]:
    spec = {"template": {"kind": kind, "spec": SFT if template is None else template}, "parameters": parameters}
    return expanded(new(JobKind.SWEEP, {**spec, **more}))


def flow(**jobs: Spec) -> list[NewJob]:
    return expanded(new(JobKind.FLOW, {"jobs": jobs}))


def test_a_sweep_becomes_a_job_that_waits_for_its_members_and_the_members_in_order() -> None:
    parent, *members = sweep({"rank": [8, 16], "lr": {"scale": "log", "low": 1e-5, "high": 1e-3, "count": 2}})
    assert [member.id for member in members] == ["job-1~0000", "job-1~0001", "job-1~0002", "job-1~0003"]
    assert parent.after == tuple(Dependency(job=member.id, condition="any") for member in members)
    assert [(member.spec["rank"], member.spec["lr"]) for member in members] == [
        (8, 1e-5),
        (8, 1e-3),
        (16, 1e-5),
        (16, 1e-3),
    ]
    assert members[1].name == "rank=8,lr=0.001"
    assert {member.kind for member in members} == {JobKind.SUPERVISED}
    assert {(member.parent, member.nice, member.notify_url) for member in members} == {("job-1", 7, None)}


def test_members_draw_the_same_numbers_so_that_only_the_parameters_differ() -> None:
    parent, *members = sweep({"rank": [8, 16]})
    assert {member.drawn_seed for member in members} == {parent.drawn_seed}


def test_how_many_run_at_once_is_told_to_every_member() -> None:
    parent, *members = sweep({"rank": [8, 16]}, at_once=1)
    assert (parent.at_once, {member.at_once for member in members}) == (None, {1})


class Shape(JobPart):
    rank: int = 8
    alpha: int = 16


class Nested(JobSpec):
    lora: Shape = Shape()
    other: Shape | None = None
    seed: int = 0


class Lone(JobSpec):
    lora: Shape = Shape()


def test_a_parameter_may_be_the_last_part_of_a_path_where_no_other_field_has_it() -> None:
    assert path_of("rank", Lone, at="p") == "lora.rank"
    assert path_of("other.rank", Nested, at="p") == "other.rank"
    with pytest.raises(InvalidInput, match=r"p\.rank: may be lora\.rank or other\.rank; name the whole path"):
        path_of("rank", Nested, at="p")


def test_a_parameter_may_lie_in_an_object_and_leaves_the_rest_of_it() -> None:
    _, *members = sweep({"loss_config.beta": [0.1, 0.2]}, {**SFT, "loss_config": {"sft_weight": 0.5}}, kind="dpo")
    assert [member.spec["loss_config"] for member in members] == [
        {"beta": 0.1, "sft_weight": 0.5},
        {"beta": 0.2, "sft_weight": 0.5},
    ]


def test_a_parameter_that_stands_for_no_field_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidInput, match=r"spec\.parameters\.rnk: is no field.*did you mean rank\?"):
        sweep({"rnk": [8]})


def test_a_member_whose_spec_is_wrong_refuses_the_whole_sweep_and_is_named() -> None:
    with pytest.raises(
        InvalidInput, match=r"spec\.template\.spec \(rank=0\)\.rank: must be greater than or equal to 1"
    ):
        sweep({"rank": [8, 0]})
    with pytest.raises(InvalidInput, match=r"epocs.*did you mean epochs"):
        sweep({"rank": [8]}, {**SFT, "epocs": 3})


def test_a_sweep_of_sweeps_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"spec\.template\.kind: 'sweep' is none of"):
        sweep({"seed": [1]}, kind="sweep")


def test_a_flow_becomes_a_job_for_each_of_its_names_and_one_that_waits_for_them_all() -> None:
    parent, *jobs = flow(
        train={"kind": "sft", "spec": SFT},
        again={"kind": "sft", "spec": {**SFT, "model": "${train.result.checkpoint}"}},
        after_all={"kind": "sft", "spec": SFT, "after": {"again": "any"}},
    )
    assert [job.id for job in jobs] == ["job-1~train", "job-1~again", "job-1~after_all"]
    assert [job.after for job in jobs] == [
        (),
        (Dependency(job="job-1~train", condition="ok"),),
        (Dependency(job="job-1~again", condition="any"),),
    ]
    assert jobs[1].spec["model"] == "${job-1~train.result.checkpoint}"
    assert [one.job for one in parent.after] == [job.id for job in jobs]


def test_a_sweep_within_a_flow_is_waited_for_as_one_and_its_members_wait_for_what_it_waits_for() -> None:
    spec = {
        "template": {"kind": "sft", "spec": {**SFT, "data": "${check.result.file}"}},
        "parameters": {"rank": [8, 16]},
    }
    parent, *jobs = flow(
        check={"kind": "ops", "spec": {"model": "base", "data": "file-2"}},
        search={"kind": "sweep", "spec": spec},
        more={"kind": "sft", "spec": {**SFT, "model": "${search.best.checkpoint}"}},
    )
    assert [job.id for job in jobs] == [
        "job-1~check",
        "job-1~search",
        "job-1~search~0000",
        "job-1~search~0001",
        "job-1~more",
    ]
    assert {job.after for job in jobs[2:4]} == {(Dependency(job="job-1~check", condition="ok"),)}
    assert jobs[2].spec["data"] == "${job-1~check.result.file}"
    assert [one.job for one in parent.after] == ["job-1~check", "job-1~search", "job-1~more"]


def test_a_field_that_holds_a_reference_is_judged_later_and_the_others_now() -> None:
    flow(train={"kind": "sft", "spec": SFT}, more={"kind": "sft", "spec": {**SFT, "rank": "${train.result.rank}"}})
    with pytest.raises(InvalidInput, match="batch_size"):
        flow(
            train={"kind": "sft", "spec": SFT},
            more={"kind": "sft", "spec": {**SFT, "rank": "${train.result.rank}", "batch_size": "many"}},
        )


def test_a_dry_run_of_a_flow_leaves_out_what_depends_on_results() -> None:
    jobs = {
        "train": {"kind": "sft", "spec": SFT},
        "beside": {"kind": "sft", "spec": SFT, "after": {"train": "ok"}},
        "more": {"kind": "sft", "spec": {**SFT, "model": "${train.result.checkpoint}"}},
    }
    _, *found = expanded(new(JobKind.FLOW, {"jobs": jobs, "dry_run": True}))
    assert [(job.name, job.after, job.spec["dry_run"]) for job in found] == [("train", (), True), ("beside", (), True)]


def test_any_other_job_stays_alone() -> None:
    job = new(JobKind.SUPERVISED, SFT)
    assert expanded(job) == [job]
