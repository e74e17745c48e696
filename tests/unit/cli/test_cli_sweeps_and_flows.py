"""Sweeps and flows on the command line: how values are written, what a file may hold, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinkle.cli.jobs.flow import flow_jobs, read_flow
from twinkle.cli.jobs.members import print_members
from twinkle.cli.jobs.options import LocalFile, Shared
from twinkle.cli.jobs.submit import submit
from twinkle.cli.jobs.sweep import is_sweep, sweep_spec
from twinkle.core.errors import ConfigError
from twinkle.wire.bodies.jobs_groups import JobMemberInfo, JobMembersResponse
from twinkle.wire.bodies.jobs_sweep import Goal

FLOW = """
name: nightly
jobs:
  train:
    kind: sft
    spec: {model: base, data: DATA}
  more:
    kind: sft
    after: {train: any}
    spec: {model: "${train.result.checkpoint}", data: file-2}
"""


def test_values_are_lists_and_ranges_and_the_number_at_once() -> None:
    shared = Shared(sweep=["rank=8,16,32", "lr=log:1e-5:1e-3:5", "loss=a,b", "train_mlp=true", "%4"])

    assert sweep_spec("sft", {"model": "base"}, shared) == {
        "template": {"kind": "sft", "spec": {"model": "base"}},
        "parameters": {
            "rank": [8, 16, 32],
            "lr": {"scale": "log", "low": 1e-5, "high": 1e-3, "count": 5},
            "loss": ["a", "b"],
            "train_mlp": [True],
        },
        "at_once": 4,
    }


def test_a_random_sweep_needs_no_count_and_says_how_many() -> None:
    shared = Shared(sweep=["lr=lin:0:1"], sweep_mode="random", sweep_runs=7, sweep_seed=3, metric="loss", goal="max")

    assert sweep_spec("sft", {}, shared) == {
        "template": {"kind": "sft", "spec": {}},
        "parameters": {"lr": {"scale": "lin", "low": 0.0, "high": 1.0}},
        "mode": "random",
        "runs": 7,
        "seed": 3,
        "metric": "loss",
        "goal": "max",
    }


@pytest.mark.parametrize(
    ("sweep", "complaint"),
    [
        (["rank"], "write FIELD=8,16,32"),
        (["lr=log:1:2:3:4"], "a range is log:LOW:HIGH:COUNT"),
        (["lr=log:1e-3:1e-5:5"], "LOW below HIGH"),
        (["rank=8", "rank=16"], "rank is given twice"),
        (["rank=8", "%x"], "write %N"),
        (["%2"], "at least one FIELD=VALUES"),
    ],
)
def test_a_sweep_that_is_not_written_as_it_must_be_is_refused_with_how(sweep: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        sweep_spec("sft", {}, Shared(sweep=sweep))


def test_what_is_said_of_a_sweep_without_one_is_refused() -> None:
    assert not is_sweep(Shared())
    with pytest.raises(ConfigError, match="--metric says something of a sweep, and there is none"):
        is_sweep(Shared(metric="loss"))


def test_a_flow_is_read_and_its_local_files_are_found(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    path = tmp_path / "flow.yaml"
    path.write_text(FLOW.replace("DATA", str(data)))

    flow = read_flow(path)

    jobs = flow_jobs(flow)
    assert flow.name == "nightly"
    assert jobs["train"]["spec"]["data"] == LocalFile(data, "fine-tune")
    assert jobs["more"] == {
        "kind": "sft",
        "spec": {"model": "${train.result.checkpoint}", "data": "file-2"},
        "after": {"train": "any"},
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("jobs: [", "is not YAML"),
        ("- a", "it has no `jobs`"),
        ("jobs: {a: {kind: sft, spec: {}}}\njbos: {}", r"jbos: is not known here; did you mean jobs\?"),
        ("jobs: {a: {kind: sft, spce: {}}}", r"jobs\.a\.spce: is not known here; did you mean spec\?"),
        ("jobs: {a: {kind: sft, spec: {}, after: {b: ok}}}", "the flow has no job 'b'"),
        ("jobs: {a: {kind: sft, spec: {}, after: {a: ok}}}", "in a circle: a after a"),
        ("jobs: {a: {kind: sft, spec: {from: 2020-01-01}}}", "as texts, in quotes"),
    ],
)
def test_a_file_that_is_no_flow_is_refused_before_anything_is_sent(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=complaint):
        read_flow(path)


def test_the_schemas_are_printed_without_a_server() -> None:
    of_jobs = json.loads(CliRunner().invoke(submit, ["--schema"]).stdout)
    of_flows = json.loads(CliRunner().invoke(submit, ["flow", "--schema"]).stdout)

    assert {"sft", "sweep", "flow"} <= set(of_jobs["properties"]["kind"]["enum"])
    assert "sft" in of_flows["$defs"]["FlowJob"]["properties"]["kind"]["enum"]
    assert of_flows["additionalProperties"] is False


def test_the_table_of_a_sweep_marks_the_best_and_says_how_many_stand_where(capsys: pytest.CaptureFixture[str]) -> None:
    members = [
        JobMemberInfo(
            id=f"job-1~000{number}",
            name=f"rank={rank}",
            kind="sft",
            state="succeeded",
            values={"rank": rank},
            metric=loss,
            is_best=rank == 16,
        )
        for number, (rank, loss) in enumerate([(8, 0.5), (16, 0.25)])
    ]

    print_members(JobMembersResponse(members=members, counts={"succeeded": 2}, metric="eval_loss", goal=Goal.MIN))

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["best", "rank", "state", "eval_loss", "id", "reason"] in lines
    assert ["8", "succeeded", "0.5", "job-1~0000"] in lines
    assert ["*", "16", "succeeded", "0.25", "job-1~0001"] in lines
    assert ["2", "succeeded"] in lines
