"""SentencePiece's pairs as llama.cpp has them: pieces with scores, the pair of the best piece merged first, else bytes.

llama.cpp merges any two neighbours whose text together is a piece, by its score, the leftmost first among equals
(``llm_tokenizer_spm`` in ``llama-vocab.cpp``). A ``tokenizer.json`` names the pairs one by one, in their order. Both
come to the same where all pairs that make a piece are named, one behind another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPACE = "\u2581"
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
BYTES = tuple(f"<0x{number:02X}>" for number in range(256))


@dataclass(frozen=True)
class Pieces:
    """What llama.cpp is told of them.

    Args:
        scores: Of the pieces that pairs come to; all others are never merged to.
        adds_space: Whether a text begins with a space, and every text behind a special token.
        unknown: What stands for nothing, since there is a piece for each byte.
    """

    scores: Mapping[str, float]
    adds_space: bool
    unknown: str


def pieces_of(written: Mapping[str, Any]) -> Pieces | None:
    """Those of a ``tokenizer.json``; none if llama.cpp would cut a text otherwise."""
    model: Mapping[str, Any] = written["model"]
    adds_space = _adds_space(written)
    has_rest = model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model.get("type") != "BPE" or not model.get("byte_fallback") or model.get("ignore_merges") or has_rest:
        return None
    vocabulary: Mapping[str, int] = model["vocab"]
    unknown: str = model.get("unk_token") or ""
    if adds_space is None or unknown not in vocabulary or any(piece not in vocabulary for piece in BYTES):
        return None
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    scores: dict[str, float] = {}
    last = ""
    for first, second in pairs:
        piece = first + second
        if piece != last and piece in scores:
            return None
        scores.setdefault(piece, -float(len(scores) + 1))
        last = piece
    named = set(pairs)
    apart = {token["content"] for token in written["added_tokens"]}.union(BYTES)
    for piece in vocabulary.keys() - apart:
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if any(cut not in named for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary):
            return None
    return Pieces(scores=scores, adds_space=adds_space, unknown=unknown)


def _adds_space(written: Mapping[str, Any]) -> bool | None:
    """Whether a space is put before a text; nothing if texts are changed or cut in another way."""
    if written.get("pre_tokenizer") is not None:
        return None
    normalizer = written.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if steps == [_PREPEND, _REPLACE]:
        return True
    return False if steps == [_REPLACE] else None
