"""How far one request has come in vLLM: its sequences under way, those that are done, the scores of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.sampler.drawing import Draw, DrawnToken
from twinkle.sampler.prompt_scores import LogitsOfRows, PromptScores
from twinkle.sampler.request import DrawnSequence, SampleRequest, SampleResult, StopReason, rule_of, seen_by
from twinkle.sampler.sequence import GrowingSequence, Stretch, finished_beyond
from twinkle.sampler.stops import StopRule
from twinkle.sampler.vllm.adapters import AdapterFolder

NAME = "twinkle"
"""Under it a request's ``extra_args`` hold the name of its sample."""


class VLLMProgress:
    """One request under way, on one version of its adapter."""

    def __init__(
        self,
        request: SampleRequest,
        stop: StopRule,
        folder: AdapterFolder | None,
        *,
        max_length: int,
        vocab_size: int,
        barred: tuple[int, ...] = (),
    ) -> None:
        self.request = request
        self.stop = stop
        self.folder = folder
        self.rule = rule_of(request, barred)
        room = max_length - len(request.prompt)
        self.max_tokens = room if request.max_tokens is None else min(room, request.max_tokens)
        self._scores = PromptScores(request, vocab_size, barred)
        self._finished: dict[int, DrawnSequence] = {}
        self.was_restarted = False
        self.num_cached_tokens = 0

    @property
    def is_done(self) -> bool:
        """Whether every sample is finished."""
        return len(self._finished) == self.request.num_samples

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked about the prompt."""
        return self._scores.first_position < len(self.request.prompt)

    def score(self, start: int, num_tokens: int, logits_of: LogitsOfRows) -> bool:
        """See :meth:`PromptScores.score`."""
        return self._scores.score(start, num_tokens, logits_of)

    def finish(self, sequence: GrowingSequence, stop_reason: StopReason) -> None:
        """Ends one sample."""
        self._finished[sequence.sample] = sequence.finish(stop_reason, self.request.topk_sample_logprobs)

    def restart(self) -> None:
        """Forgets what was computed; all of it will be computed again."""
        self._finished.clear()
        self.was_restarted = True

    def finished_beyond(self, known: Sequence[int]) -> list[Stretch]:
        """Returns what the finished samples have beyond what is known of them."""
        return [finished_beyond(sample, done, known[sample]) for sample, done in self._finished.items()]

    def result(self) -> SampleResult:
        """Returns the finished samples in order, with the scores of the prompt."""
        sequences = tuple(self._finished[sample] for sample in range(self.request.num_samples))
        return self._scores.fill(SampleResult(self.request.key, sequences, num_cached_tokens=self.num_cached_tokens))


@dataclass(frozen=True, slots=True)
class Advance:
    """What one pass of vLLM's has given a sequence."""

    name: str
    tokens: list[int]
    num_cached_tokens: int
    """Of its prompt, found computed when it began."""


@dataclass(eq=False)
class RunningSample:
    """One sequence as vLLM runs it, under a name of its own.

    vLLM draws for a prompt it has computed in part as well, and throws that away; hence a token only counts when vLLM
    hands it out, and until then the latest draw replaces the one before.
    """

    name: str
    progress: VLLMProgress
    sequence: GrowingSequence
    drawn: DrawnToken | None = None
    is_broken: bool = False
    """Whether its logits were not finite."""

    @property
    def group(self) -> str:
        """With whom it shares the places."""
        return self.progress.request.cache_group

    def prompt(self, cache_generation: int) -> dict[str, Any]:
        """Returns vLLM's form of the prompt. Its salt goes into the hash of each cached block.

        Only what has the same salt finds a block: prompts of the same group, computed since all was last forgotten.
        """
        request = self.progress.request
        return {"prompt_token_ids": list(request.prompt), "cache_salt": f"{cache_generation}:{request.cache_group}"}

    def sampling(self) -> dict[str, Any]:
        """Returns what vLLM's ``SamplingParams`` are made of; the prompt is computed anew if it is to be scored.

        vLLM neither draws nor stops: it is told to be greedy among the one token that is left to it, and to go on. A
        request that may not generate still has its prompt computed, for one token that is dropped.
        """
        return {
            "temperature": 0,
            "max_tokens": max(self.progress.max_tokens, 1),
            "ignore_eos": True,
            "detokenize": False,
            "skip_reading_prefix_cache": self.sequence.sample == 0 and self.progress.scores_prompt,
            "extra_args": {NAME: self.name},
        }

    def next_draw(self) -> Draw:
        """Returns what decides its next token."""
        request = self.progress.request
        return Draw(
            self.progress.rule,
            request.seed,
            self.sequence.sample,
            len(self.sequence.tokens),
            request.topk_sample_logprobs,
            request.repetition_penalty,
            seen_by(request, self.sequence.tokens),
        )
