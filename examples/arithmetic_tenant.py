"""What each tenant of `arithmetic_rl.py` does: learn the format, then be rewarded for right answers.

Plain use of the official `tinker` SDK, in the shape of the Tinker cookbook's `rl_loop`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import tinker
from transformers import PreTrainedTokenizerBase

from arithmetic_task import Problem, Split, advantages, lesson_datum, policy_datum, reward

MAX_ANSWER_TOKENS = 3
SEED_BITS = 31
ADAM_EPSILON = 1e-8


@dataclass(frozen=True)
class Plan:
    """The sizes of both phases."""

    rank: int = 32
    format_steps: int = 30
    format_batch: int = 32
    format_learning_rate: float = 5e-3
    steps: int = 150
    problems_per_step: int = 16
    group_size: int = 16
    learning_rate: float = 1e-3
    evaluate_every: int = 10
    heldout_samples: int = 16


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step of the second phase measured."""

    seed: int
    step: int
    reward: float
    """Mean over the step's answers, sampled at temperature 1 from the weights before its update."""
    heldout_reward: float | None
    """The same on the problems held out, in the steps that measure it."""
    groups_trained: int
    """Groups in which not all answers had the same reward; the others have nothing to teach."""
    sampled_tokens: int
    trained_tokens: int
    save_s: float
    sample_s: float
    train_s: float


@dataclass(frozen=True)
class Group:
    """All answers to one problem, and what each earned."""

    prompt: list[int]
    sequences: list[tinker.SampledSequence]
    rewards: list[float]

    @property
    def teaches(self) -> bool:
        """Whether some answers were better than others."""
        return len(set(self.rewards)) > 1

    def datums(self) -> list[tinker.Datum]:
        """Returns every answer as a training example."""
        scored = zip(self.sequences, advantages(self.rewards), strict=True)
        return [policy_datum(self.prompt, one.tokens, one.logprobs or [], advantage=a) for one, a in scored]


class Tenant:
    """One tenant's run; its seed decides the adapter, the order of the problems and the answers that are sampled."""

    def __init__(
        self,
        service: tinker.ServiceClient,
        tokenizer: PreTrainedTokenizerBase,
        *,
        base_model: str,
        plan: Plan,
        split: Split,
        seed: int,
    ) -> None:
        self.seed = seed
        self._service = service
        self._plan = plan
        self._split = split
        self._tokenizer = tokenizer
        self._end = [tokenizer.eos_token_id]
        self._rng = random.Random(seed)
        self._problems = endless(split.training, self._rng)
        self._training = service.create_lora_training_client(base_model=base_model, rank=plan.rank, seed=seed).result()

    def learn_format(self) -> str:
        """Trains on questions with the answers to other questions, so that only the form can be learned.

        Returns:
            The path of the saved state.
        """
        plan, problems = self._plan, self._split.training
        for step in range(plan.format_steps):
            asked = self._rng.choices(problems, k=plan.format_batch)
            answered = self._rng.choices(problems, k=plan.format_batch)
            batch = [
                lesson_datum(self._encode(one.question), self._encode(str(other.answer)) + self._end)
                for one, other in zip(asked, answered, strict=True)
            ]
            self._update(batch, "cross_entropy", plan.format_learning_rate * (1 - step / plan.format_steps))
        return self._training.save_state("format").result().path

    def learn_answers(self, start: str, record: Callable[[StepRecord], None]) -> str:
        """Reinforcement learning from the saved state `start`, with a fresh optimizer.

        The figures of each step, and of the weights at the end, go to `record`.

        Returns:
            The path of the saved state.
        """
        self._training = self._service.create_training_client_from_state(start).result()
        for step in range(self._plan.steps + 1):
            record(self._step(step))
        return self._training.save_state("answers").result().path

    def _step(self, step: int) -> StepRecord:
        """Samples, rewards and, but for the step after the last, trains."""
        plan = self._plan
        started = time.monotonic()
        sampler = self._training.save_weights_and_get_sampling_client().result()
        saved = time.monotonic()
        problems = [next(self._problems) for _ in range(plan.problems_per_step)]
        heldout = self._split.heldout if step in {*range(0, plan.steps, plan.evaluate_every), plan.steps} else ()
        asked = self._ask(sampler, problems, num_samples=plan.group_size)
        asked_heldout = self._ask(sampler, heldout, num_samples=plan.heldout_samples)
        groups = [self._rewarded(problem, future) for problem, future in asked]
        heldout_groups = [self._rewarded(problem, future) for problem, future in asked_heldout]
        sampled = time.monotonic()
        trained = [group for group in groups if group.teaches] if step < plan.steps else []
        datums = [datum for group in trained for datum in group.datums()]
        if datums:
            self._update(datums, "importance_sampling", plan.learning_rate)
        return StepRecord(
            seed=self.seed,
            step=step,
            reward=mean_reward(groups),
            heldout_reward=mean_reward(heldout_groups) if heldout_groups else None,
            groups_trained=len(trained),
            sampled_tokens=sum(len(one.tokens) for group in (*groups, *heldout_groups) for one in group.sequences),
            trained_tokens=sum(datum.model_input.length for datum in datums),
            save_s=saved - started,
            sample_s=sampled - saved,
            train_s=time.monotonic() - sampled,
        )

    def _ask(
        self, sampler: tinker.SamplingClient, problems: Sequence[Problem], *, num_samples: int
    ) -> list[tuple[Problem, tinker.APIFuture[tinker.SampleResponse]]]:
        """Asks every problem so many times; waits for nothing."""
        return [
            (
                problem,
                sampler.sample(
                    tinker.ModelInput.from_ints(self._encode(problem.question)),
                    num_samples=num_samples,
                    sampling_params=tinker.SamplingParams(
                        max_tokens=MAX_ANSWER_TOKENS,
                        temperature=1.0,
                        stop=self._end,
                        seed=self._rng.getrandbits(SEED_BITS),
                    ),
                ),
            )
            for problem in problems
        ]

    def _rewarded(self, problem: Problem, future: tinker.APIFuture[tinker.SampleResponse]) -> Group:
        """Waits for the answers to a problem."""
        sequences = future.result().sequences
        texts = [self._tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
        rewards = [
            reward(problem, text, ended=one.stop_reason == "stop") for text, one in zip(texts, sequences, strict=True)
        ]
        return Group(self._encode(problem.question), sequences, rewards)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _update(self, batch: list[tinker.Datum], loss: tinker.types.LossFnType, learning_rate: float) -> None:
        """One optimizer step; waits for its end."""
        # Both are in the queue before the first result is awaited.
        gradients = self._training.forward_backward(batch, loss_fn=loss)
        update = self._training.optim_step(tinker.AdamParams(learning_rate=learning_rate, eps=ADAM_EPSILON))
        gradients.result()
        update.result()


def mean_reward(groups: Sequence[Group]) -> float:
    """Returns the mean over all answers of all groups."""
    rewards = [reward for group in groups for reward in group.rewards]
    return sum(rewards) / len(rewards)


def endless(problems: Sequence[Problem], rng: random.Random) -> Iterator[Problem]:
    """Yields problems for ever; each is used once before any is used again."""
    while True:
        yield from rng.sample(problems, len(problems))
