"""Where a training stands: what is saved of it, and which of its checkpoints stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from twinkle.core.job import JsonObject
from twinkle.jobs.training.course import Course

FINAL = "final"
CANCELLED = "cancelled"

BUDGET, EXPIRY, PATIENCE, CANCEL = "budget", "expiry", "patience", "cancel"
"""What may end a training before its time."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What has come of a training so far."""

    num_tokens: int = 0
    num_trained: int = 0
    train_loss: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    """The share of the evaluation's trained tokens that the model found the likeliest, where it was told."""
    evaluated_step: int = -1
    best_step: int | None = None
    best_loss: float | None = None
    evaluations_without_progress: int = 0

    def evaluated(self, step: int, loss: float, *, min_delta: float) -> Tally:
        """With an evaluation more; the one before the first step is nobody's progress."""
        told = replace(self, eval_loss=loss, evaluated_step=step)
        if step == 0:
            return told
        if self.best_loss is None or loss < self.best_loss - min_delta:
            return replace(told, best_step=step, best_loss=loss, evaluations_without_progress=0)
        return replace(told, evaluations_without_progress=self.evaluations_without_progress + 1)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A checkpoint of a training: its state to go on from, and its weights to sample from."""

    name: str
    step: int
    path: str
    sampler_path: str
    tally: Tally

    @property
    def eval_loss(self) -> float | None:
        """Of the evaluation at this step, if there was one."""
        return self.tally.eval_loss if self.tally.evaluated_step == self.step else None

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Kept:
        """What ``asdict`` gave."""
        return cls(**{**saved, "tally": Tally(**saved["tally"])})


@dataclass(kw_only=True)
class Standing:
    """All that one attempt tells the next. Small: it is written after every few steps.

    A ``generation`` is one training run in the service. There is a second one only where an operation ended for a
    reason of the service's, or where a cancelled training is taken up again: the numbers of the first are used up, so a
    new run goes on from a checkpoint, its ``origin``.
    """

    course: Course
    digests: tuple[str, ...]
    generation: int = 0
    origin: Kept | None = None
    reference_generation: int = 0
    step: int = -1
    """The last step whose results were taken in; 0 is what comes before the first, -1 nothing."""
    tally: Tally = field(default_factory=Tally)
    kept: list[Kept] = field(default_factory=list)
    last_step: int | None = None
    """The step behind which training ends before its time: the last one that was begun when its end was asked for."""
    ended_by: str | None = None
    """Who asked for it."""
    budget_step: int | None = None
    """The last step that a budget of tokens lets be trained, if that is not all."""
    ran_s: float = 0.0
    """For how long its attempts have run, pauses left out."""
    queue_s: float = 0.0
    """For how long operations of its runs stood in line while nothing of theirs was computed."""
    compute_s: float = 0.0
    """For how long they were computed."""
    timed_seq: int = -1
    """The last operation of the present run that is in these."""
    left: Kept | None = None
    """The checkpoint of a training that was cancelled."""

    def to_json(self) -> JsonObject:
        """As it is saved."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """What :meth:`to_json` gave."""
        origin, left = saved["origin"], saved["left"]
        return cls(
            **{
                **saved,
                "course": cls.course_from_json(saved["course"]),
                "digests": tuple(saved["digests"]),
                "origin": None if origin is None else Kept.from_json(origin),
                "tally": Tally(**saved["tally"]),
                "kept": [Kept.from_json(one) for one in saved["kept"]],
                "left": None if left is None else Kept.from_json(left),
            }
        )

    @classmethod
    def course_from_json(cls, saved: Mapping[str, Any]) -> Course:
        """A course as it was saved."""
        return Course(**saved)

    @property
    def from_step(self) -> int:
        """The step that the present run goes on from."""
        return 0 if self.origin is None else self.origin.step

    @property
    def end(self) -> int:
        """The step behind which training ends, as far as is known."""
        ends = (self.course.num_steps, self.last_step, self.budget_step)
        return min(step for step in ends if step is not None)

    def stopped_by(self, step: int, patience: int) -> str | None:
        """What ended training behind a step, if that was before its time."""
        if step >= self.course.num_steps:
            return None
        if self.has_enough(patience):
            return PATIENCE
        return self.ended_by if self.last_step is not None and step != self.budget_step else BUDGET

    def has_enough(self, patience: int) -> bool:
        """Whether the evaluations say that more brings nothing."""
        return 0 < patience <= self.tally.evaluations_without_progress

    def first_number(self, step: int) -> int:
        """The number of a step's first operation in the present run; behind the last step the next free one."""
        return self.course.first_numbers(self.from_step)[step - self.from_step]

    def keep(self, checkpoint: Kept) -> None:
        """Put a checkpoint on the list."""
        self.kept = [one for one in self.kept if one.path != checkpoint.path] + [checkpoint]

    def superseded(self, *, keep_last: int, keep_best: bool) -> list[Kept]:
        """Take the checkpoints off the list that need not stay: all but the last few and the best one."""
        stays = {one.path for one in self.kept[len(self.kept) - keep_last :]} if keep_last else set()
        # What a run began from is asked for by whoever takes the job up.
        stays |= {self.origin.path} if self.origin is not None else set()
        judged = [(one.eval_loss, one.step, one.path) for one in self.kept if one.eval_loss is not None]
        if keep_best and judged:
            stays.add(min(judged)[-1])
        dropped = [one for one in self.kept if one.path not in stays]
        self.kept = [one for one in self.kept if one.path in stays]
        return dropped

    def begin_again(self) -> None:
        """Let a new run go on from the last checkpoint there is; what came behind that is gone through again."""
        self.origin = self.left or (self.kept[-1] if self.kept else self.origin)
        self.generation += 1
        self.timed_seq = -1
        if self.origin is None:
            self.reference_generation, self.step, self.tally = self.generation, -1, Tally()
        else:
            self.step, self.tally = self.origin.step, self.origin.tally
        self.last_step = self.left = None
