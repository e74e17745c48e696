"""The text of tokens that are still arriving: as much of it as no later token can change."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.server.model_texts import BROKEN_CHARACTER, TextModel


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
        self._searches = [StopSearch(stop) for stop in stops]
        self._tokens: list[int] = []
        # Decoding starts at a token before what is decoded already: some decoders treat the first one differently.
        self._context = 0
        self._decoded = 0
        self._text = ""
        self._open_text = ""
        self._num_searched = 0
        self._is_stuck = False

    @property
    def settled(self) -> str:
        """What is certain to be the beginning of the whole text."""
        text = self._text + self._open_text
        return text[: min([search.earliest for search in self._searches], default=len(text))]

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what comes next. Blocks for as long as decoding it takes."""
        self._tokens += tokens
        if self._is_stuck:
            return
        before = self._text + self._open_text
        self._decode()
        text = self._text + self._open_text
        if not text.startswith(before):
            # A decoder that takes back what it said; the text as a whole is known at the end.
            self._is_stuck, self._text, self._open_text = True, before, ""
            return
        for search in self._searches:
            search.feed(text[self._num_searched :])
        self._num_searched = len(text)

    def _decode(self) -> None:
        end = len(self._tokens) - self._text_model.num_open(self._tokens[self._context :])
        known = self._text_model.decode(self._tokens[self._context : self._decoded])
        text = self._text_model.decode(self._tokens[self._context : end])
        if not text.startswith(known):
            self._context, self._decoded, self._text, known = 0, 0, "", ""
            text = self._text_model.decode(self._tokens[:end])
        new = text[len(known) :]
        if new.endswith(BROKEN_CHARACTER):
            self._open_text = new.rstrip(BROKEN_CHARACTER)
            return
        if new:
            self._context = self._decoded
        self._decoded = max(end, self._decoded)
        self._text += new
        self._open_text = ""


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
