"""A tokenizer as llama.cpp has it: pieces, or byte-level pairs whose splitting it knows by the expression itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import transformers

from twinkle.core.errors import ConfigError
from twinkle.hub.trust import naming_code
from twinkle.workers.jobs.export.gguf_pieces import BYTES, Pieces, pieces_of

TOKENIZER_FILE = "tokenizer.json"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, tuple[str, bool]] = {
    _CONTRACTIONS + r"\p{N}" + _REST: ("qwen2", False),
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: ("llama-bpe", True),
}
"""By the expression that splits text, llama.cpp's name for it and whether whole words are looked for first."""


class Vocabulary:
    """The tokens of a model's folder."""

    def __init__(self, folder: Path, *, num_rows: int) -> None:
        """Read the tokenizer.

        Args:
            folder: The model's.
            num_rows: Of its embedding, which may have more than there are tokens.

        Raises:
            ConfigError: It is of a kind that llama.cpp would take for another.
        """
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise ConfigError(f"GGUF holds the tokenizer too, and the base model has no {TOKENIZER_FILE}")
        self._written: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        with naming_code(folder.name):
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        self.num_rows = num_rows
        self.pieces = pieces_of(self._written)
        """Those of SentencePiece's kind; none of a tokenizer of byte-level pairs."""
        self.pre = "default" if self.pieces is not None else self._find_split()

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Add all that a GGUF file says of a tokenizer."""
        tokens, kinds = zip(*self._tokens(), strict=True)
        writer.add_tokenizer_model("gpt2" if self.pieces is None else "llama")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(tokens))
        if self.pieces is None:
            writer.add_token_merges([_merge_text(merge) for merge in self._written["model"]["merges"]])
        else:
            writer.add_token_scores([self.pieces.scores.get(token, 0.0) for token in tokens])
            writer.add_unk_token_id(tokens.index(self.pieces.unknown))
            writer.add_add_space_prefix(self.pieces.adds_space)
        writer.add_token_types(list(kinds))
        begin, end, pad = (getattr(self._tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad"))
        if begin is not None:
            writer.add_bos_token_id(begin)
        if end is not None:
            writer.add_eos_token_id(end)
        if pad is not None:
            writer.add_pad_token_id(pad)
        encoded = self._tokenizer("a")["input_ids"]
        writer.add_add_bos_token(begin is not None and encoded[0] == begin)
        writer.add_add_eos_token(end is not None and encoded[-1] == end)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The template for conversations, if there is one."""
        template = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def end(self) -> str | None:
        """The token that ends a turn."""
        token: str | None = self._tokenizer.eos_token
        return token

    def _tokens(self) -> Iterator[tuple[str, int]]:
        kinds = {} if self.pieces is None else _kinds(self.pieces)
        plain = {number: token for token, number in self._written["model"]["vocab"].items()}
        added = {token["id"]: token for token in self._written["added_tokens"]}
        for number in range(self.num_rows):
            if number in added:
                kind = gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED
                yield added[number]["content"], kinds.get(added[number]["content"], kind)
            elif number in plain:
                yield plain[number], kinds.get(plain[number], gguf.TokenType.NORMAL)
            else:
                yield f"[PAD{number}]", gguf.TokenType.UNUSED

    def _find_split(self) -> str:
        model = self._written["model"]
        steps = self._written.get("pre_tokenizer") or {}
        steps = steps.get("pretokenizers", [steps])
        is_split = [step.get("type") for step in steps] == ["Split", "ByteLevel"]
        split = steps[0].get("pattern", {}).get("Regex") if is_split else None
        known = SPLITS.get(split or "")
        if model.get("type") != "BPE" or known is None or bool(model.get("ignore_merges")) != known[1]:
            raise ConfigError(
                "the base model's tokenizer is not converted to GGUF: it is neither one of byte-level pairs that splits"
                " text as Llama 3 or Qwen do, nor one of pieces as Llama 2's; llama.cpp would take it for another."
                " Export it as peft or merged"
            )
        return known[0]


def _kinds(pieces: Pieces) -> dict[str, gguf.TokenType]:
    """Of the pieces that are no texts."""
    return {pieces.unknown: gguf.TokenType.UNKNOWN, **dict.fromkeys(BYTES, gguf.TokenType.BYTE)}


def _merge_text(merge: str | list[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)
