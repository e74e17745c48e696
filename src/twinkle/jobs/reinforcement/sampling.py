"""Answers drawn through the service: of the weights under training, and what a reference thinks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.core.job import JobFailed
from twinkle.jobs.context import JobContext
from twinkle.jobs.data import TokenSequence
from twinkle.jobs.reinforcement.course import REFERENCE_SAMPLER, PolicyCourse
from twinkle.jobs.reinforcement.rollouts import Answer, Prompt, of_answer
from twinkle.jobs.run import JobSampler
from twinkle.jobs.training.data import TrainingData
from twinkle.jobs.training.steps import outcome_of
from twinkle.wire.bodies.jobs_rl import RolloutSpec
from twinkle.wire.paths import SCHEME
from twinkle.wire.sampling import SamplingParams


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """Draws answers of one job.

    Attributes:
        context: The job's.
        spec: How answers are drawn.
        course: Of whose seed all draws' follow.
        data: The prompts.
        base_model: Whose tokenizer reads the answers.
    """

    context: JobContext[Any]
    spec: RolloutSpec
    course: PolicyCourse
    data: TrainingData
    base_model: str

    async def prompts(self, places: Sequence[int]) -> list[Prompt]:
        """Prompts by their places."""
        examples = await self.data.examples(places)
        return [
            Prompt(
                place=example.place,
                number=example.number,
                tokens=_only(example.sequences).input_ids,
                item=example.item or {},
                line=example.line,
            )
            for example in examples
        ]

    async def draw(
        self, sampler: JobSampler, prompts: Sequence[Prompt], *, count: int, what: str, step: int
    ) -> list[Answer]:
        """``count`` answers to each prompt, those to one prompt next to each other."""
        tickets = []
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=self.spec.max_tokens,
                temperature=self.spec.temperature,
                seed=self.course.seed_of(what, step, prompt.place),
            )
            tickets.append(await sampler.sample(number, prompt.tokens, params=params, num_samples=count))
        results = [await outcome_of(ticket, f"step {step}", self.data) for ticket in tickets]
        drawn = [
            (prompt, index, sequence)
            for prompt, result in zip(prompts, results, strict=True)
            for index, sequence in enumerate(result.sequences)
        ]
        texts = await self.context.tools.decode(self.base_model, [sequence.tokens.tolist() for *_, sequence in drawn])
        return [
            Answer(
                prompt=prompt,
                index=index,
                tokens=np.asarray(sequence.tokens, np.int64),
                logprobs=np.asarray(sequence.logprobs, np.float32),
                has_ended=sequence.stop_reason == "stop",
                text=text,
            )
            for (prompt, index, sequence), text in zip(drawn, texts, strict=True)
        ]


@dataclass(eq=False, kw_only=True)
class Reference:
    """A model that is not trained here, asked for the logprobs of answers: where training began, or a teacher."""

    context: JobContext[Any]
    course: PolicyCourse
    data: TrainingData
    model: str
    """A base model, or a checkpoint's path."""
    _sampler: JobSampler | None = field(default=None, init=False)

    async def logprobs(
        self, answers: Sequence[Answer], *, generation: int, step: int, for_evaluation: bool = False
    ) -> list[npt.NDArray[np.float64]]:
        """Of each answer's tokens (A,)."""
        sampler = await self._opened()
        # Nothing is wanted of what it goes on with.
        params = SamplingParams(max_tokens=1, seed=0)
        tickets = []
        for place, answer in enumerate(answers):
            number = self.course.question_number(generation, step, place, for_evaluation=for_evaluation)
            tickets.append(await sampler.sample(number, answer.whole, params=params, prompt_logprobs=True))
        found = []
        for answer, ticket in zip(answers, tickets, strict=True):
            result = await outcome_of(ticket, f"step {step}, the reference", self.data)
            if result.prompt_logprobs is None:
                raise JobFailed("internal", f"{self.model} gave no logprobs of a prompt", is_transient=True)
            found.append(of_answer(answer, result.prompt_logprobs))
        return found

    async def _opened(self) -> JobSampler:
        if self._sampler is None:
            name = {"path": self.model} if self.model.startswith(SCHEME) else {"base_model": self.model}
            self._sampler = await self.context.door.sampler(REFERENCE_SAMPLER, **name)
        return self._sampler


def _only(sequences: Sequence[TokenSequence]) -> TokenSequence:
    (sequence,) = sequences
    return sequence
