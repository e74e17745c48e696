"""Text that grows with its tokens: whatever was said once, the whole text begins with."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from twinkle.server.model_texts import BROKEN_CHARACTER, TextModel, TokenOffsets
from twinkle.server.openai.growing_text import GrowingText

LIKE_LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
"""Metaspaces, the bytes of rare characters one by one, no space at the start."""


def with_bytes() -> TextModel:
    """A byte-level tokenizer: every byte is a token, some sequences of them are too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "©")]
    vocab = {text: i for i, text in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    return completed(tokenizer)


def with_byte_fallback() -> TextModel:
    """A tokenizer like Llama 2's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abSTOP", "▁a", "ab", "▁▁", "né"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = LIKE_LLAMA
    return completed(tokenizer)


def with_words() -> TextModel:
    """A tokenizer whose words are joined by spaces, except where one continues another."""
    pieces = ["[UNK]", "a", "b", "##a", "##STOP", "ST", "OP", ".", "né"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return completed(tokenizer)


def completed(tokenizer: Tokenizer) -> TextModel:
    tokenizer.add_special_tokens([AddedToken("<e>", special=True), AddedToken("<t>", special=False)])
    return TextModel(tokenizer, None, {}, ["<e>"])


TEXT_MODELS = {"bytes": with_bytes(), "byte fallback": with_byte_fallback(), "words": with_words()}
SIZES = {"bytes": 256 + 3 + 2, "byte fallback": 257 + 11 + 2, "words": 9 + 2}
STOPS = ("ab", "STOP", "aab", "é", " a", "<t>")


def whole_text(text_model: TextModel, tokens: list[int], stops: tuple[str, ...], stop_reason: str) -> str:
    """What an answer that is not streamed holds."""
    text = text_model.decode(tokens)
    ends = [place for stop in stops if stop_reason == "stop" and (place := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


@pytest.mark.parametrize("kind", TEXT_MODELS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_settled_begins_every_text_that_may_still_come(kind: str, data: st.DataObject) -> None:
    text_model = TEXT_MODELS[kind]
    common = [token for text in ("a", "b", "é", "€", "STOP", " ", "<e>", "<t>") for token in _tokens_of(kind, text)]
    token = st.sampled_from(common) | st.integers(0, SIZES[kind] - 1)
    pieces = data.draw(st.lists(st.lists(token, max_size=4), max_size=8))
    stops = tuple(data.draw(st.lists(st.sampled_from(STOPS), max_size=3, unique=True)))
    growing = GrowingText(text_model, stops)
    tokens = list(itertools.chain(*pieces))

    said = ""
    for piece in pieces:
        growing.extend(piece)
        assert growing.settled.startswith(said)
        said = growing.settled

    for stop_reason in ("stop", "length"):
        assert whole_text(text_model, tokens, stops, stop_reason).startswith(said)


def _tokens_of(kind: str, text: str) -> list[int]:
    tokenizer = TEXT_MODELS[kind]._tokenizer
    token = tokenizer.token_to_id(text)
    if token is not None and (kind != "bytes" or text.startswith("<")):
        return [token]
    if kind == "byte fallback":
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    if kind == "bytes":
        alphabet = dict(zip(_byte_order(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
        return [tokenizer.token_to_id(alphabet[byte]) for byte in text.encode()]
    return []


def _byte_order() -> list[int]:
    """The bytes in the order of the characters that stand for them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [byte for byte in range(256) if byte not in printable]


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [
        ("bytes", len("né € 🙂 ab")),
        # It has no letters of its own but a and b: all else is one run of bytes, which these two end.
        ("byte fallback", len("ab") + 1),
    ],
)
def test_no_part_of_a_character_is_ever_shown(kind: str, num_steps: int) -> None:
    text = "né € 🙂 ab"
    tokens = [token for character in text for token in _tokens_of(kind, character)]
    growing = GrowingText(TEXT_MODELS[kind], ())

    shown = []
    for token in tokens:
        growing.extend([token])
        assert BROKEN_CHARACTER not in growing.settled
        shown.append(growing.settled)

    assert shown[-1] == TEXT_MODELS[kind].decode(tokens) == text
    assert len(set(shown)) == num_steps


def test_after_a_long_run_of_tokens_that_are_no_text_the_rest_is_left_to_the_end() -> None:
    growing = GrowingText(TEXT_MODELS["bytes"], ())
    half = TEXT_MODELS["bytes"]._tokenizer.token_to_id("Ã")
    growing.extend(_tokens_of("bytes", "a"))
    for _ in range(600):
        growing.extend([half])
    growing.extend(_tokens_of("bytes", "b"))

    assert growing.settled == "a"


def test_text_is_shown_as_soon_as_nothing_can_change_it() -> None:
    growing = GrowingText(TEXT_MODELS["bytes"], ("STOP", "TOO"))
    shown = []
    for character in "a STO STOO":
        growing.extend(_tokens_of("bytes", character))
        shown.append(growing.settled)

    assert shown == ["a", "a ", "a ", "a ", "a ", "a STO ", "a STO ", "a STO ", "a STO ", "a STO S"]


def test_nothing_behind_a_stop_is_shown() -> None:
    growing = GrowingText(TEXT_MODELS["bytes"], ("ab",))
    for character in "baabb aab":
        growing.extend(_tokens_of("bytes", character))

    assert growing.settled == "ba"


def test_a_stop_as_long_as_a_body_costs_no_more_than_reading_it() -> None:
    """Both are made of one letter, so that a search that looks back would look back all the time."""
    stop = "a" * 30_000 + "b"
    growing = GrowingText(TEXT_MODELS["bytes"], (stop,))
    (letter,) = _tokens_of("bytes", "a")
    for _ in range(400):
        growing.extend([letter] * 100)

    assert growing.settled == "a" * 10_000


def test_offsets_are_the_same_piece_by_piece() -> None:
    tokens = [token for character in "né € ab" for token in _tokens_of("bytes", character)]
    offsets = TokenOffsets(TEXT_MODELS["bytes"])
    for token in tokens:
        offsets.extend([token])

    assert offsets.known == TEXT_MODELS["bytes"].offsets(tokens)
