"""When a sequence ends: stop tokens, stop token sequences, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.sampler.request import DecodeText, SampleRequest

# Decoded beyond the longest stop string, so that a cut character or a lost leading space at the edge does not matter.
_SLACK_TOKENS = 4


@dataclass(frozen=True)
class StopRule:
    """Decides, after every new token, whether it completed a stop; what completed it stays in the output."""

    token_ids: frozenset[int]
    sequences: tuple[tuple[int, ...], ...]
    strings: tuple[str, ...]
    decode_text: DecodeText | None

    def matches(self, tokens: Sequence[int]) -> bool:
        """Whether the last of ``tokens`` (generated ones only, at least one) completes a stop.

        Raises whatever the tokenizer raises.
        """
        if tokens[-1] in self.token_ids:
            return True
        if any(tuple(tokens[-len(stop) :]) == stop for stop in self.sequences):
            return True
        return bool(self.strings) and self._string_matches(tokens)

    def _string_matches(self, tokens: Sequence[int]) -> bool:
        assert self.decode_text is not None
        text = decoded_tail(self.decode_text, tokens, num_bytes=max(len(stop.encode()) for stop in self.strings))
        return any(stop in text for stop in self.strings)


def stop_rule(request: SampleRequest, *, eos_token_ids: Sequence[int], decode_text: DecodeText | None) -> StopRule:
    """An omitted stop means the model's end-of-sequence ids; any stop that is given, even none, replaces them."""
    token_ids = request.stop_token_ids
    if token_ids is None:
        stops_given = bool(request.stop_strings or request.stop_sequences)
        token_ids = frozenset() if stops_given else frozenset(eos_token_ids)
    return StopRule(token_ids, request.stop_sequences, request.stop_strings, decode_text)


def decoded_tail(decode_text: DecodeText, tokens: Sequence[int], *, num_bytes: int) -> str:
    """Decodes as few of the last tokens as surely hold the last ``num_bytes`` bytes of text.

    A token is at least one byte, unless it decodes to nothing (special tokens); hence the window is widened until the
    text is long enough. An incomplete UTF-8 character at the end decodes to U+FFFD and matches once it is complete.
    """
    window = num_bytes + _SLACK_TOKENS
    while True:
        text = decode_text(tokens[-window:])
        if window >= len(tokens) or len(text.encode()) >= num_bytes + _SLACK_TOKENS:
            return text
        window *= 2
