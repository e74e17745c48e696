"""SIGKILL in the middle of fine-tunings: what they end with is the same to the byte as where nothing happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.crashes import Crashes
from harness.killed_runs import stored_hashes
from harness.polling import wait_for
from harness.served import Served
from harness.struck import Struck
from harness.tenant_files import TenantFiles
from twinkle.client import Client

DATA = Path(__file__).parents[2] / "examples" / "data" / "arithmetic.jsonl"
SPEC = {
    "model": "tiny",
    "batch_size": 4,
    "steps": 8,
    "eval_fraction": 0.1,
    "checkpoint_every": 3,
    "rank": 4,
    "lr": 1e-2,
}
# A model of random weights seldom ends an answer: a teacher's are cut off unless they may be long.
ANSWERS = {"batch_size": 4, "group_size": 4, "max_tokens": 4, "steps": 4, "eval_fraction": 0.2, "checkpoint_every": 2}
POLICY = {
    "grpo": {
        **ANSWERS,
        "grader": {"type": "regexp", "name": "vowels", "pattern": "[aeiou]"},
        "kl_coef": 0.05,
        "loss": "GRPOLoss",
        "loss_config": {"entropy_coef": 0.01},
    },
    "distill": {**ANSWERS, "teacher": "tiny"},
    "off_policy": {
        "teacher": "tiny",
        "mode": "off_policy",
        "group_size": 3,
        "max_tokens": 250,
        "batch_size": 1,
        "steps": 2,
        "checkpoint_every": 1,
    },
}
PAIRS = {"loss": "DPOLoss", "loss_config": {"beta": 0.5}}
POINTS = [
    ("job.claimed", "job.saved:5", "worker.executed:9", "job.worked"),
    *[pytest.param((point,), marks=pytest.mark.soak) for point in ("job.saving:4", "job.saved:2", "job.ended")],
]
# What is drawn, and what a teacher is asked; in soak alone pairs, whose jobs are those of plain lines, and a student's
# own answers, whose attempts are cut off in tests/unit/jobs/test_reinforcement_interrupted.py every day.
EVERY_DAY = {("the worker", "grpo"), ("the jobs worker", "off_policy")}
PARTS_KILLED = [
    pytest.param(part, kind, marks=() if (part, kind) in EVERY_DAY else pytest.mark.soak)
    for part in ("the API", "the worker", "the jobs worker", "the broker")
    for kind in ("sft", "dpo", "grpo", "distill", "off_policy")
]


class Tuned:
    """The service, its crash points, and what fine-tunings end with."""

    def __init__(self, served: Served, crashes: Crashes) -> None:
        self.served = served
        self.crashes = crashes
        self._key = served.create_key("tuned")
        self.files = TenantFiles(served, self._key)
        self._calm: dict[str, Any] = {}
        lines = DATA.read_text().splitlines()[:24]
        prompts = self._upload([_prompt(line) for line in lines[:10]])
        self._data = {
            "sft": self._upload(lines),
            "dpo": self._upload([_pair(line) for line in lines]),
            **dict.fromkeys(POLICY, prompts),
        }

    def calm(self, kind: str) -> Any:
        """What comes of a kind where nothing happens."""
        if kind not in self._calm:
            self._calm[kind] = self.train(kind, lambda: None)
        return self._calm[kind]

    def train(self, kind: str, fault: Callable[[], None], *, points: Sequence[str] = ()) -> Any:
        """Train while ``fault`` happens and somebody comes by the ``points``.

        What comes of it: hashes of the last checkpoint's files, the table of metrics, what the result says.
        """
        with Client(self.served.url, api_key=self._key) as client:
            own = PAIRS if kind == "dpo" else POLICY.get(kind, {})
            spec = {**SPEC, **own, "data": self._data[kind], "seed": 5}
            for point in points:
                name, _, count = point.partition(":")
                self.crashes.arm(name, count=int(count or 1))
            job = client.jobs.submit("distill" if kind == "off_policy" else kind, spec, max_attempts=20)
            fault()
            ended = job.wait(timeout_s=150)
        assert ended.state == "succeeded", ended.failure
        assert ended.result is not None
        table = self.files.get(ended.result["metrics_file"])
        told = {name: ended.result[name] for name in ("step", "loss", "eval_loss", "trained_tokens")}
        return stored_hashes(self.served, ended.result["checkpoint"]), table, told

    def check(self, key: str, file: str, fault: Callable[[], None] = lambda: None) -> Any:
        """Look at data as a job of the key's tenant while ``fault`` happens; the job at its end."""
        with Client(self.served.url, api_key=key) as client:
            job = client.jobs.submit("check", {"model": "tiny", "data": file}, max_attempts=5)
            fault()
            job.wait(timeout_s=150)
            ended = job.show()
        assert ended.state == "succeeded", ended.failure
        return ended

    def _upload(self, lines: list[str]) -> str:
        return self.files.put("data.jsonl", "\n".join(lines).encode())


def _pair(line: str) -> str:
    question, answer = json.loads(line)["messages"]
    wrong = {"role": "assistant", "content": "I do not know."}
    return json.dumps(
        {"input": {"messages": [question]}, "preferred_output": [answer], "non_preferred_output": [wrong]}
    )


def _prompt(line: str) -> str:
    return json.dumps({"messages": json.loads(line)["messages"][:1]})


@pytest.fixture(scope="module")
def tuned(struck_model: Struck) -> Iterator[Tuned]:
    tuned = Tuned(struck_model.served, struck_model.crashes)
    yield tuned
    tuned.files.close()


@pytest.mark.parametrize("points", POINTS, ids="+".join)
def test_a_kill_at(tuned: Tuned, points: tuple[str, ...]) -> None:
    calm = tuned.calm("sft")

    struck = tuned.train("sft", lambda: None, points=points)

    assert all(tuned.crashes.has_fired(point.partition(":")[0]) for point in points)
    assert struck == calm


@pytest.mark.parametrize(("part", "kind"), PARTS_KILLED)
def test_a_kill_of(tuned: Tuned, part: str, kind: str) -> None:
    calm = tuned.calm(kind)

    def kill() -> None:
        wait_for(lambda: tuned.served.query(_UNDER_WAY), what="a fine-tuning under way")
        tuned.served.part(part).kill()

    def kill_while_asking() -> None:
        # The teacher answers in a moment: it stands still until it was asked.
        with tuned.served.standing_still(tuned.served.engine_pid()):
            wait_for(lambda: tuned.served.query(_TEACHING), what="a teacher being asked")
            tuned.served.part(part).kill()

    assert tuned.train(kind, kill_while_asking if kind == "off_policy" else kill) == calm


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "distill", "off_policy"])
def test_kills_at_points_drawn_by_chance(tuned: Tuned, kind: str, seed: int) -> None:
    calm = tuned.calm(kind)

    with tuned.crashes.drawn(seed) as told:
        struck = tuned.train(kind, lambda: None)

    assert struck == calm, told


# Of every day is the attempt cut off in tests/unit/server/test_file_clients.py.
@pytest.mark.soak
def test_a_check_whose_worker_is_killed_while_rows_are_written_tells_the_same_and_keeps_them_once(tuned: Tuned) -> None:
    # Rows are kept for a tenant: two of them, so that neither finds what the other's job has made.
    keys = {name: tuned.served.create_key(name) for name in ("looks", "struck")}
    uploaded = {}
    for name, key in keys.items():
        with closing(TenantFiles(tuned.served, key)) as files:
            uploaded[name] = files.put("data.jsonl", DATA.read_bytes())
    calm = tuned.check(keys["looks"], uploaded["looks"])

    def kill() -> None:
        tuned.crashes.wait("data.shard_written")
        tuned.served.part("the jobs worker").kill()

    tuned.crashes.arm("data.shard_written", signal="STOP")
    tuned.crashes.arm("job.worked")
    struck = tuned.check(keys["struck"], uploaded["struck"], kill)

    assert tuned.crashes.has_fired("job.worked")
    assert struck.result == calm.result
    assert [one.outcome for one in struck.attempts] == ["lost", "lost", "succeeded"]
    assert tuned.served.query(_KEPT, struck.id) == tuned.served.query(_KEPT, calm.id) != []
    assert not tuned.served.query("SELECT 1 FROM session WHERE job IN (?, ?)", calm.id, struck.id), "nothing of a mesh"


_KEPT = "SELECT digest, num_shards, size_bytes FROM prepared_data WHERE tenant = (SELECT tenant FROM job WHERE id = ?)"
_UNDER_WAY = "SELECT 1 FROM job WHERE state = 'running' AND phase = 'training'"
_TEACHING = "SELECT 1 FROM job WHERE state = 'running' AND phase = 'asking the teacher'"
