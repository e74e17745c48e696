"""What is told of a training: events as it goes on, and a table of its metrics when it has ended."""

from __future__ import annotations

import csv
import io
from typing import Any

from twinkle.core.job import JobEvent, JobFailed
from twinkle.jobs.context import JobContext
from twinkle.jobs.training.course import Course
from twinkle.jobs.training.standing import Kept
from twinkle.jobs.training.steps import Outcome

COLUMNS = (
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "trained_tokens",
    "preferred",
    "margin",
    "eval_loss",
    "eval_accuracy",
    "eval_preferred",
    "eval_margin",
    "reward",
    "reward_std",
    "without_spread",
    "kl_reference",
    "reverse_kl",
    "kl_sampler",
    "answer_tokens",
    "ended",
    "eval_reward",
)
"""Of the table: what follows from the data and the model alone, never from the time."""
METRICS_FILE = "metrics.csv"
_PURPOSE = "fine-tune-results"
_PAGE = 1000


def metrics_of(course: Course, outcome: Outcome, *, seconds: float) -> JobEvent:
    """What a step told."""
    data: dict[str, float] = {"step": outcome.step, **outcome.figures, **(outcome.eval_figures or {})}
    if outcome.step:
        data |= {
            "epoch": course.epoch_of(outcome.step),
            "learning_rate": course.rate(outcome.step),
            "tokens": outcome.amount.num_tokens,
            "trained_tokens": outcome.amount.num_trained,
            "seconds": round(seconds, 3),
        }
    told = [f"{name.replace('_', ' ')} {data[name]:.4f}" for name in ("loss", "eval_loss") if name in data]
    return JobEvent(kind="metrics", message=f"step {outcome.step}: {', '.join(told) or 'done'}", data=data)


def checkpoint_event(kept: Kept) -> JobEvent:
    """A checkpoint that is complete and can be used."""
    data = {
        "name": kept.name,
        "step": kept.step,
        "path": kept.path,
        "sampler_path": kept.sampler_path,
        "loss": kept.tally.train_loss,
        "eval_loss": kept.eval_loss,
        "eval_accuracy": None if kept.eval_loss is None else kept.tally.eval_accuracy,
    }
    return JobEvent(kind="checkpoint", message=f"saved {kept.name}", data=data)


async def write_metrics(context: JobContext[Any]) -> str:
    """Put all metrics of the job into one table, a line a step; the id of its file."""
    steps: dict[int, dict[str, Any]] = {}
    after = 0
    while True:
        path = f"/api/native/v1/jobs/{context.job.id}/events?after={after}&limit={_PAGE}"
        answer = await context.door.request("GET", path)
        if not answer.is_success:
            raise JobFailed("internal", f"the job's events could not be read: {answer.text}", is_transient=True)
        events = answer.json()["events"]
        # Of a step that was gone through again, by a run that went on from before it, the last time counts.
        steps |= {one["data"]["step"]: one["data"] for one in events if one["kind"] == "metrics"}
        if not events:
            break
        after = events[-1]["number"]
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(steps[step] for step in sorted(steps))
    return await context.files.write(METRICS_FILE, table.getvalue().encode(), purpose=_PURPOSE)
