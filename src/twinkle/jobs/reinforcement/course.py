"""The course of learning from answers: that of a training, with answers sampled before each step's passes.

A step's first operation opens its weights for sampling; then come the passes over its answers, its ``optim_step``, and
behind it the weights that an evaluation samples from, and a checkpoint's two. All numbers follow from the spec and the
number of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle.core.batch_loss import BATCH_LOSSES
from twinkle.core.errors import InvalidInput
from twinkle.core.job import JsonObject, seed_of_text
from twinkle.jobs.training.course import MAX_BATCH_TOKENS, OPERATION_TOKENS, Course, decide
from twinkle.jobs.training.standing import Standing
from twinkle.wire.bodies.jobs_rl import MAX_ROLLOUTS, RolloutSpec

REFERENCE_SAMPLER = 0
"""The number of the sampler that a reference, or a teacher, is asked by."""
_AUTO_BATCH = 16
_STEP_BITS, _PART_BITS = 22, 21


@dataclass(frozen=True, kw_only=True)
class PolicyCourse(Course):
    """What was decided when the prompts were known. ``batch_size`` counts prompts."""

    group_size: int
    answers_per_operation: int

    @property
    def eval_operations(self) -> int:
        """The weights that an evaluation samples from."""
        return 1

    def passes_of(self, step: int) -> int:
        """What comes before a step's ``optim_step``: its weights for sampling, then the passes over its answers."""
        return 1 + math.ceil(len(self.rows_of(step)) * self.group_size / self.answers_per_operation)

    def sampler_number(self, generation: int, step: int, *, for_evaluation: bool) -> int:
        """The job's sampler on a step's weights, no other's in any of its runs."""
        return 1 + 2 * (generation * (self.num_steps + 1) + step) + for_evaluation

    def question_number(self, generation: int, step: int, place: int, *, for_evaluation: bool) -> int:
        """The number of a question to the reference, no other's in any of the job's runs."""
        part = place | int(for_evaluation) << _PART_BITS
        return (generation << _STEP_BITS | step) << (_PART_BITS + 1) | part

    def seed_of(self, *parts: object) -> int:
        """A seed that follows from the course's own and from what it is for."""
        return seed_of_text(":".join(str(part) for part in (self.seed, *parts)))


@dataclass(kw_only=True)
class PolicyStanding(Standing):
    """Where it stands. ``graded`` are the grades of the step under way: they are given once, whoever goes on."""

    graded: JsonObject | None = None
    num_ungraded: int = 0
    """Answers so far in whose grading something failed."""
    rewards: dict[str, float] = field(default_factory=dict)
    """``reward`` of the last step and ``eval_reward`` of the last evaluation, where there are graders."""

    @classmethod
    def course_from_json(cls, saved: Mapping[str, Any]) -> Course:
        """See :meth:`Standing.course_from_json`."""
        return PolicyCourse(**saved)


def decide_policy(
    spec: RolloutSpec, *, seed: int, num_rows: int, num_eval_rows: int, longest_prompt: int, group_size: int, loss: str
) -> PolicyCourse:
    """The course of learning from the answers to so many prompts.

    Raises:
        InvalidInput: A batch is too large for one operation, or there are no prompts.
    """
    if spec.batch_size == "auto":
        fitting = max(1, MAX_ROLLOUTS // group_size)
        spec = spec.model_copy(update={"batch_size": min(_AUTO_BATCH, fitting, max(num_rows, 1))})
    longest = longest_prompt + spec.max_tokens
    course = decide(
        spec,
        seed=seed,
        num_rows=num_rows,
        num_eval_rows=num_eval_rows,
        longest_row=longest,
        whole_batches=False,
        with_reference=False,
    )
    num_answers = course.batch_size * group_size
    if loss in BATCH_LOSSES and num_answers * longest > MAX_BATCH_TOKENS:
        raise InvalidInput(
            "batch_size",
            f"{num_answers} answers of up to {longest} tokens are more than the {MAX_BATCH_TOKENS} tokens that"
            f" {loss} takes at once; lower batch_size, group_size or max_tokens, or use a loss of single answers",
        )
    at_once = num_answers if loss in BATCH_LOSSES else max(1, OPERATION_TOKENS // longest)
    return PolicyCourse(**vars(course), group_size=group_size, answers_per_operation=at_once)
