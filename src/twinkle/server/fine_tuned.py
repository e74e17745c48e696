"""Names of fine-tuned models, as OpenAI's clients have them: ``ft:<base model>:<tenant>:<suffix>:<job>``.

A name is no thing of its own: it says which job's checkpoint is meant, and lives as long as that does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from twinkle.core.errors import NotFound
from twinkle.core.job import Job, JobKind, JobState
from twinkle.storage.jobs.jobs import Jobs

PREFIX = "ft:"
MAX_CHECKPOINTS = 1000
KINDS = (JobKind.SUPERVISED, JobKind.PREFERENCE, JobKind.REINFORCEMENT, JobKind.DISTILL)
"""Of jobs whose models have such names."""
_MAX_LISTED = 1000
_STEP = "ckpt-step-"


@dataclass(frozen=True)
class FineTunedName:
    """What a name says; ``step`` is that of a checkpoint on the way, ``None`` the end."""

    base_model: str
    tenant: str
    suffix: str | None
    job: str
    step: int | None = None

    def __str__(self) -> str:
        behind = [] if self.step is None else [f"{_STEP}{self.step}"]
        return PREFIX + ":".join([self.base_model, self.tenant, self.suffix or "", self.job, *behind])

    @classmethod
    def parse(cls, name: str) -> FineTunedName:
        """Reads a name; only the base model may hold colons itself.

        Raises:
            NotFound: It is none.
        """
        parts = name.removeprefix(PREFIX).split(":")
        step = None
        if parts[-1].startswith(_STEP) and parts[-1].removeprefix(_STEP).isdecimal():
            step = int(parts.pop().removeprefix(_STEP))
        if not name.startswith(PREFIX) or len(parts) < 4:
            raise NotFound(f"no model {name!r}; a fine-tuned one is called ft:<base model>:<tenant>:<suffix>:<job>")
        *base_model, tenant, suffix, job = parts
        return cls(":".join(base_model), tenant, suffix or None, job, step)


class FineTunedModels:
    """Finds what names of fine-tuned models stand for. Blocks."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def sampler_path(self, name: str, tenant: str) -> str:
        """The checkpoint to sample from.

        Raises:
            NotFound: There is no such job of this tenant, or it has no such checkpoint.
        """
        return self._path(name, tenant, at_the_end="sampler_checkpoint", on_the_way="sampler_path")

    def training_path(self, name: str, tenant: str) -> str:
        """The checkpoint to go on from.

        Raises:
            NotFound: As :meth:`sampler_path` does.
        """
        return self._path(name, tenant, at_the_end="checkpoint", on_the_way="path")

    def of_checkpoints(self, tenant: str, paths: Collection[str]) -> list[tuple[str, float]]:
        """The names under which a tenant's latest jobs have made some checkpoints, and when, newest first."""
        found = self._jobs.page(tenant, limit=_MAX_LISTED, kinds=KINDS, states=[JobState.SUCCEEDED])
        named = [(name_of(job), job) for job in found]
        return [
            (name, job.finished_at or job.created_at)
            for name, job in named
            if name is not None and job.result is not None and job.result["sampler_checkpoint"] in paths
        ]

    def _path(self, name: str, tenant: str, *, at_the_end: str, on_the_way: str) -> str:
        wanted = FineTunedName.parse(name)
        missing = NotFound(f"no model {name!r}")
        try:
            job = self._jobs.find(wanted.job, tenant)
        except NotFound:
            raise missing from None
        if known_name(job, step=wanted.step) != wanted:
            raise missing
        if wanted.step is None:
            path = (job.result or {}).get(at_the_end)
        else:
            saved = self._jobs.latest_events(job.id, tenant, kinds=["checkpoint"], limit=MAX_CHECKPOINTS)
            path = next((event.data[on_the_way] for event in saved if event.data.get("step") == wanted.step), None)
        if path is None:
            raise missing
        return str(path)


def known_name(job: Job, *, step: int | None = None) -> FineTunedName | None:
    """What a job's model is called, once it is known what it is made of."""
    base_model = job.progress.get("base_model")
    return None if base_model is None else FineTunedName(base_model, job.tenant, job.spec.get("suffix"), job.id, step)


def name_of(job: Job) -> str | None:
    """What the model is called that a job has made; ``None`` without one."""
    has_model = job.state is JobState.SUCCEEDED and job.result is not None and "sampler_checkpoint" in job.result
    return str(known_name(job)) if has_model else None
