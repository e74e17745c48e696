"""The text of tokens that are still arriving: as much of it as no later token can change."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.core.errors import InvalidInput
from twinkle.server.model_texts import TextModel

_LONGEST_SILENCE = 512
"""After so many tokens in a row that are no text, the rest is told at the end."""


class GrowingText:
    """Decodes as tokens come. What :attr:`settled` says once, the whole text begins with.

    Held back are: a character whose bytes have not all come; bytes that a later one may still join; whatever is, or may
    become, one of the stop texts.

    Args:
        text_model: Decodes.
        stops: Texts that end a sample and are no part of it.
    """

    def __init__(self, text_model: TextModel, stops: Sequence[str]) -> None:
        self._text_model = text_model
        self._decode_next = text_model.decoder()
        self._searches = [StopSearch(stop) for stop in stops]
        self._open: list[int] = []
        self._num_silent = 0
        self._text = ""
        self._is_stuck = False

    @property
    def settled(self) -> str:
        """What is certain to be the beginning of the whole text."""
        return self._text[: min([search.earliest for search in self._searches], default=len(self._text))]

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what comes next. Blocks for as long as decoding it takes."""
        if self._is_stuck:
            return
        self._open += tokens
        num_settled = len(self._open) - self._text_model.num_open(self._open)
        if num_settled == 0:
            return
        try:
            new = self._decode_next(self._open[:num_settled])
        except InvalidInput:
            # A decoder that takes back what it said; the text as a whole is known at the end.
            self._is_stuck = True
            return
        del self._open[:num_settled]
        self._num_silent = 0 if new else self._num_silent + num_settled
        # All of a silent run is decoded again with each token of it.
        self._is_stuck = self._num_silent > _LONGEST_SILENCE
        self._text += new
        for search in self._searches:
            search.feed(new)


class StopSearch:
    """Looks for one text in another that is still growing, without ever looking back (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = _fallbacks(stop)
        self._num_matched = 0
        self._num_read = 0

    @property
    def earliest(self) -> int:
        """Where the stop begins, or may begin if the text goes on as the stop does; else where the text ends."""
        return self._num_read - self._num_matched

    def feed(self, text: str) -> None:
        """Read on. Once the stop was found, nothing changes any more."""
        for character in text:
            if self._num_matched == len(self._stop):
                return
            while self._num_matched and self._stop[self._num_matched] != character:
                self._num_matched = self._fallback[self._num_matched - 1]
            self._num_matched += self._stop[self._num_matched] == character
            self._num_read += 1


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of ``stop``: the length of the longest one, shorter than it, that it ends with."""
    lengths = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = lengths[matched - 1]
        matched += stop[i] == stop[matched]
        lengths[i] = matched
    return lengths
