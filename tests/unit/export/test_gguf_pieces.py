"""Tokenizers of SentencePiece's kind in GGUF: scores, kinds and bytes, and what llama.cpp would cut otherwise."""

import itertools
import json
import shutil

import gguf
import pytest
import transformers

from harness.exports import make_adapter, request_for
from twinkle.core.errors import ConfigError
from twinkle.workers.jobs.export.build import outline_of, take_step, verify_form

TEXTS = ["Hello World 12345, it's a test", "  two spaces\n\ttab", "ä€ 😀", "the the  the", "</s>again<s> and", ""]


@pytest.fixture(scope="module")
def base(gguf_base):
    return gguf_base("llama2-tokens")


@pytest.fixture(scope="module")
def fields(base, tmp_path_factory):
    """What gguf's own reader finds."""
    folder = tmp_path_factory.mktemp("written")
    request = request_for(folder / "out", base, make_adapter(folder / "adapter", base), ["gguf"])
    for step in outline_of(request).steps:
        take_step(request, step)
    verify_form(request, "gguf")
    read = gguf.GGUFReader(folder / "out/gguf/model.gguf").fields
    return {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in read.items()}


def test_every_row_has_its_piece_its_score_and_its_kind(base, fields):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokens, scores, kinds = fields["tokens"], fields["scores"], fields["token_type"]

    assert (fields["model"], fields["pre"]) == ("llama", "default")
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(tokens) == len(scores) == len(kinds) == 512
    assert kinds[:3] == [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    assert tokens[3:259] == [f"<0x{number:02X}>" for number in range(256)]
    assert set(kinds[3:259]) == {gguf.TokenType.BYTE}
    assert set(kinds[259 : len(tokenizer)]) == {gguf.TokenType.NORMAL}
    assert set(kinds[len(tokenizer) :]) == {gguf.TokenType.UNUSED}
    assert (fields["unknown_token_id"], fields["bos_token_id"], fields["eos_token_id"]) == (0, 1, 2)
    assert (fields["add_space_prefix"], fields["add_bos_token"], fields["add_eos_token"]) == (True, True, False)


@pytest.mark.parametrize("text", TEXTS)
def test_merging_the_pair_of_the_best_score_cuts_texts_as_transformers_does(base, fields, text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for part in text.replace("</s>", "<s>").split("<s>"):
        assert cut(part, fields) == tokenizer(part, add_special_tokens=False)["input_ids"]


def cut(text, fields):
    """As ``llm_tokenizer_spm`` does: neighbours that are a piece together, the best first, the leftmost of equals."""
    ids = {token: number for number, token in enumerate(fields["tokens"])}
    symbols = list(f" {text}".replace(" ", "\u2581")) if text else []
    while True:
        beside = enumerate(itertools.pairwise(symbols))
        pairs = [(fields["scores"][ids[a + b]], -at) for at, (a, b) in beside if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    known = [[ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [number for some in known for number in some]


def _no_bytes(written):
    written["model"]["byte_fallback"] = False


def _spaces_otherwise(written):
    written["normalizer"] = None
    written["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}


def _pair_left_out(written):
    merges = written["model"]["merges"]
    of = ["".join(merge) for merge in merges]
    merges.pop(next(at for at, piece in enumerate(of) if of.count(piece) > 1))


@pytest.mark.parametrize("change", [_no_bytes, _spaces_otherwise, _pair_left_out])
def test_pieces_that_llama_cpp_would_cut_otherwise_are_refused(base, tmp_path, change):
    changed = shutil.copytree(base, tmp_path / "base")
    written = json.loads((changed / "tokenizer.json").read_text())
    change(written)
    (changed / "tokenizer.json").write_text(json.dumps(written))

    with pytest.raises(ConfigError, match="tokenizer"):
        outline_of(request_for(tmp_path / "out", changed, make_adapter(tmp_path / "adapter", changed), ["gguf"]))
