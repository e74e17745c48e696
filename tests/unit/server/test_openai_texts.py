"""Between text and tokens: what a model's files may do to the server, and how samples become texts."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from harness.clock import HandClock
from twinkle.core.errors import InvalidInput
from twinkle.server.model_texts import MOST_BYTES_PER_TOKEN, TextModel, Texts
from twinkle.server.openai.answers import choices_of, completion_logprobs
from twinkle.server.openai.drawing import Drawing
from twinkle.server.openai.ordering import Drawn
from twinkle.wire.sample_result import SampleResult, WireSequence

CONTEXT = 1 << 17


def read(folder: Path, template: str) -> TextModel:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<e>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    (folder / "chat_template.jinja").write_text(template)
    text_model = Texts(HandClock()).of(str(folder))
    assert text_model is not None
    return text_model


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ nothing.of_this }}"],
)
def test_a_template_can_neither_reach_out_nor_change_its_input(tmp_path: Path, template: str) -> None:
    text_model = read(tmp_path, template)
    with pytest.raises(InvalidInput, match="chat template refuses"):
        text_model.encode_chat([{"role": "user", "content": "hi"}], {}, context=CONTEXT)


def test_a_text_that_no_context_holds_is_refused_by_its_bytes(tmp_path: Path) -> None:
    text_model = read(tmp_path, "{{ messages[0].content }}")
    longest = "é" * (8 * MOST_BYTES_PER_TOKEN // 2)

    assert len(text_model.encode(longest, context=8)) == 8 * MOST_BYTES_PER_TOKEN
    with pytest.raises(InvalidInput, match=r"prompt: are 257 bytes of text; .* context of 8 tokens holds 256"):
        text_model.encode(longest + "a", context=8)
    with pytest.raises(InvalidInput, match="messages: are 257 bytes"):
        text_model.encode_chat([{"role": "user", "content": longest + "a"}], {}, context=8)


def test_others_go_on_while_a_long_text_is_cut_into_tokens(tmp_path: Path) -> None:
    text_model = read(tmp_path, "")
    begun, num_turns = threading.Event(), 0

    def encode() -> None:
        begun.set()
        text_model.encode("the quick brown fox " * 40_000, context=CONTEXT)

    encoding = threading.Thread(target=encode)
    encoding.start()
    begun.wait()
    while encoding.is_alive():
        encoding.join(0.001)
        num_turns += 1

    assert num_turns > 5


def test_a_folder_without_a_tokenizer_is_none(tmp_path: Path) -> None:
    assert Texts(HandClock()).of(str(tmp_path)) is None
    assert Texts(HandClock()).of(None) is None


@pytest.mark.parametrize(("drawn", "text"), [("né€ STOP<e>", "né€ "), ("né€<e>", "né€"), ("naïve STOP", "naïve ")])
def test_a_text_ends_before_what_stopped_it_and_its_scores_too(tmp_path: Path, drawn: str, text: str) -> None:
    text_model = read(tmp_path, "")
    tokens = np.array(text_model.encode(drawn, context=CONTEXT), dtype=np.int32)
    sequence = WireSequence(tokens, np.full(len(tokens), -np.inf, dtype=np.float32), "stop")
    drawing = Drawing(
        tokens=[1],
        pictures=(),
        num_samples=1,
        max_tokens=9,
        topk=0,
        stops=("STOP",),
        temperature=1,
        top_p=1,
        seed=None,
    )

    (choice,) = choices_of([Drawn("id", SampleResult((sequence,)))], [drawing], text_model)

    assert (choice.text, choice.finish_reason) == (text, "stop")
    assert choice.num_scored == len(text.encode())
    scores = completion_logprobs(choice.scores(text_model), text_model)
    assert scores["token_logprobs"] == [-9999.0] * choice.num_scored
