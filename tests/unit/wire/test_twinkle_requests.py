"""What is judged of the Twinkle dialect's requests before they are accepted."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.wire.peft_requests import read_peft
from twinkle.wire.twinkle_requests import checkpoint_name, checkpoint_path, count_tokens


def test_a_config_is_kept_in_peft_s_words_and_what_says_nothing_is_left_out() -> None:
    sent = {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": None,
        "use_rslora": False,
        "peft_version": "9",
        "unheard_of": 1,
    }

    read = read_peft(json.dumps(sent))

    assert read.kept == {"peft_type": "LORA", "target_modules": "all-linear", "r": 16, "lora_alpha": 32.0}
    assert read.warnings == ()
    assert read_peft({"rank": 4}).settings.r == 4


def test_what_is_not_applied_is_said() -> None:
    warnings = read_peft({"lora_dropout": 0.1, "bias": "all", "modules_to_save": ["lm_head"]}).warnings

    assert [warning.partition("=")[0] for warning in warnings] == ["lora_dropout", "bias", "modules_to_save"]


@pytest.mark.parametrize("pattern", ["q_proj", r".*\.layers\.[0-9]+\.(q_proj|v_proj)", r".*self_attn.*_proj$"])
def test_patterns_of_names_are_taken(pattern: str) -> None:
    assert read_peft({"target_modules": pattern}).kept["target_modules"] == pattern


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "[a-z]*x", ".*.*.*.*x", "(?=a)b", "a{1,9}", r"(\w+)\1"])
def test_patterns_that_may_take_for_ever_to_search_with_are_refused_at_once(pattern: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidInput, match=r"config\.target_modules: as a pattern"):
        read_peft({"target_modules": pattern})
    with pytest.raises(InvalidInput):
        read_peft({"target_modules": pattern + "a" * 900 + "!"})
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("config", ["[]", "{", "7", '"a"'])
def test_what_is_no_object_is_no_config(config: str) -> None:
    with pytest.raises(InvalidInput, match="config: "):
        read_peft(config)


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ([{"input_ids": [1, 2]}, {"input_ids": [[1, 2], [3]]}], 5),
        ([{"messages": [{"role": "user", "content": [{"type": "text", "text": "hé"}]}]}], len("user" + "text") + 3),
        ([{}], 0),
    ],
)
def test_rows_come_to_their_tokens_and_conversations_to_their_bytes(inputs: Any, tokens: int) -> None:
    assert count_tokens(inputs) == tokens


@pytest.mark.parametrize(
    ("name", "kept"),
    [("a b/c", "a_b_c"), ("é", "_"), ("..", "__"), (".", "_"), ("x" * 300, "x" * 255), ("", None), (None, None)],
)
def test_a_name_becomes_one_that_a_checkpoint_may_have(name: str | None, kept: str | None) -> None:
    assert checkpoint_name(name) == kept


def test_a_checkpoint_is_named_by_its_path_in_either_scheme_or_within_its_run() -> None:
    named = [
        checkpoint_path(text, run_id="s:train:0") for text in ("tinker://r/weights/a", "twinkle://r/weights/a", "a")
    ]

    assert [str(path) for path in named] == ["tinker://r/weights/a"] * 2 + ["tinker://s:train:0/weights/a"]
