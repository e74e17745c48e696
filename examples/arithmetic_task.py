"""The task of `arithmetic_rl.py`: sums of small numbers, which answers are right, and what the trainer is given."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import tinker

SMALLEST_ANSWER, LARGEST_ANSWER = 4, 9


@dataclass(frozen=True)
class Problem:
    """One sum, asked as a text to go on with, such as `3+4=`."""

    a: int
    b: int

    @property
    def question(self) -> str:
        """The prompt."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> int:
        """The only answer that is rewarded."""
        return self.a + self.b


@dataclass(frozen=True)
class Split:
    """Problems to train on, and problems that neither phase of training ever sees."""

    training: tuple[Problem, ...]
    heldout: tuple[Problem, ...]

    @property
    def chance(self) -> float:
        """How often a training problem is answered rightly with the answer to a training problem drawn at random."""
        answers = [problem.answer for problem in self.training]
        return sum(answers.count(answer) for answer in answers) / len(answers) ** 2


def split_problems(*, num_heldout: int, seed: int) -> Split:
    """Returns all sums from 4 to 9, split at random.

    All answers have one digit, and none is so common that giving it always would pay: 9 is right for ten sums of 45.
    Of a sum that is held out, `3+4`, the same with its numbers swapped, `4+3`, may well be trained on.
    """
    problems = [Problem(a, total - a) for total in range(SMALLEST_ANSWER, LARGEST_ANSWER + 1) for a in range(total + 1)]
    random.Random(seed).shuffle(problems)
    return Split(training=tuple(problems[num_heldout:]), heldout=tuple(problems[:num_heldout]))


def parse_answer(text: str) -> int | None:
    """Returns the number that an answer consists of, or None when there is anything but digits in it."""
    return int(text) if re.fullmatch(r"[0-9]+", text) else None


def reward(problem: Problem, text: str, *, ended: bool) -> float:
    """Returns 1.0 for the right number and nothing else, with the turn ended after it; otherwise 0.0."""
    return 1.0 if ended and parse_answer(text) == problem.answer else 0.0


def advantages(rewards: Sequence[float]) -> list[float]:
    """Returns how much better than the rest of its group each answer was, in standard deviations (GRPO).

    Where all are equal, all advantages are 0.
    """
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / deviation if deviation else 0.0 for reward in rewards]


def lesson_datum(prompt: Sequence[int], answer: Sequence[int]) -> tinker.Datum:
    """Returns a prompt with its answer as a training example for `cross_entropy`; only the answer is learned."""
    targets = [*prompt[1:], *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*prompt, *answer[:-1]]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": tinker.TensorData(data=weights, dtype="float32", shape=[len(targets)]),
        },
    )


def policy_datum(
    prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], *, advantage: float
) -> tinker.Datum:
    """Returns an answer as a training example for the losses on policies; the prompt's tokens count for nothing.

    Args:
        prompt: Its tokens.
        answer: The sampled tokens, with the one that ends the turn.
        logprobs: What the sampler gave each of them.
        advantage: The whole answer's.
    """
    num_before = len(prompt) - 1
    targets = [*prompt[1:], *answer]
    shape = [len(targets)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*prompt, *answer[:-1]]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=shape),
            "logprobs": tinker.TensorData(data=[0.0] * num_before + list(logprobs), dtype="float32", shape=shape),
            "advantages": tinker.TensorData(
                data=[0.0] * num_before + [advantage] * len(answer), dtype="float32", shape=shape
            ),
        },
    )
