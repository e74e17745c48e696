"""The largest operation: what one may be, whoever sends it. Refusals name the number that would pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.errors import InvalidInput

_DRAWN_BYTES = 8
"""Of a result: a token that was drawn, and its logprob; as much each alternative."""
_SCORE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    """What a sample asks for. ``num_drawn`` are the tokens of each sequence at most."""

    num_prompt_tokens: int
    num_samples: int
    num_drawn: int
    num_alternatives: int = 0
    scores_per_prompt_token: int = 0
    """Numbers that come back for each token of the prompt."""
    stops: Sequence[str] = ()

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and of all sequences."""
        return self.num_prompt_tokens + self.num_samples * self.num_drawn

    @property
    def result_bytes(self) -> int:
        """What comes back at most."""
        drawn = self.num_samples * self.num_drawn * _DRAWN_BYTES * (1 + self.num_alternatives)
        return drawn + self.num_prompt_tokens * self.scores_per_prompt_token * _SCORE_BYTES


@dataclass(frozen=True, kw_only=True)
class OperationLimits:
    """What one operation may be; each is a setting of that name."""

    max_operation_tokens: int
    max_sample_tokens: int
    max_result_bytes: int
    max_stop_bytes: int

    def check_pass(self, num_tokens: int) -> None:
        """Raise ``InvalidInput`` for a forward or forward_backward that is too large."""
        if num_tokens > self.max_operation_tokens:
            raise InvalidInput(
                "data",
                f"has {num_tokens} tokens, one operation takes {self.max_operation_tokens} at most"
                " (TWINKLE_MAX_OPERATION_TOKENS); send it in several, whose gradients add up",
            )

    def allow(self, size: SampleSize) -> bool:
        """Whether a sample is small enough."""
        try:
            self.check_sample(size)
        except InvalidInput:
            return False
        return True

    def check_sample(self, size: SampleSize) -> None:
        """Raise ``InvalidInput`` for a sample that is too large."""
        stop_bytes = sum(len(stop.encode("utf-8", "replace")) for stop in size.stops)
        if stop_bytes > self.max_stop_bytes:
            raise InvalidInput(
                "stop",
                f"are {stop_bytes} bytes of texts, {self.max_stop_bytes} pass (TWINKLE_MAX_STOP_BYTES); send fewer or"
                " shorter ones",
            )
        if size.num_tokens > self.max_sample_tokens:
            fitting = max(self.max_sample_tokens - size.num_prompt_tokens, 0) // size.num_samples
            raise InvalidInput(
                "max_tokens",
                f"{size.num_drawn} for {size.num_samples} sequences and a prompt of {size.num_prompt_tokens} come to"
                f" {size.num_tokens} tokens, one sample takes {self.max_sample_tokens} at most"
                f" (TWINKLE_MAX_SAMPLE_TOKENS); {_would_pass(fitting)}",
            )
        if size.result_bytes > self.max_result_bytes:
            scores = size.num_prompt_tokens * size.scores_per_prompt_token * _SCORE_BYTES
            each = size.num_samples * _DRAWN_BYTES * (1 + size.num_alternatives)
            raise InvalidInput(
                "max_tokens",
                f"{size.num_drawn} for {size.num_samples} sequences with {size.num_alternatives} alternatives for each"
                f" token, and {scores} bytes of scores of the prompt, come to a result of {size.result_bytes} bytes,"
                f" {self.max_result_bytes} pass (TWINKLE_MAX_RESULT_BYTES);"
                f" {_would_pass(max(self.max_result_bytes - scores, 0) // each)}",
            )


def _would_pass(max_tokens: int) -> str:
    if max_tokens == 0:
        return "ask for fewer scores of the prompt, or a shorter prompt"
    return f"max_tokens={max_tokens} would pass, or fewer sequences or alternatives"
