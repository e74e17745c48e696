"""Plain values that components hand to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.models import make_text_model
from twinkle.core.errors import InvalidInput
from twinkle.data_format import SamplingParams, pack_value, user_data_get


@pytest.mark.parametrize("value", [72, 1.5, True, None, "72", " text", {"a": [1]}, [1, "b"]])
def test_a_packed_value_is_json_and_comes_back_as_it_was(value: Any) -> None:
    packed = pack_value(value)

    assert json.loads(packed) == value
    assert user_data_get([("key", packed)], "key") == value


def test_text_that_was_not_packed_stays_text() -> None:
    assert user_data_get([("ground_truth", "72")], "ground_truth") == "72"
    assert user_data_get([("ground_truth", "true")], "ground_truth") == "true"
    assert user_data_get([("ground_truth", "[0, 1)")], "ground_truth") == "[0, 1)"


def test_user_data_is_pairs_objects_or_nothing() -> None:
    assert user_data_get([["a", "x"], ["b", "y"]], "b") == "y"
    assert user_data_get([{"target": 24, "nums": [1]}], "nums") == [1]
    assert user_data_get({"target": 24}, "target") == 24
    assert user_data_get(None, "a") is None
    assert user_data_get([("a", "x")], "b", default=7) == 7


def test_params_are_vllms_by_name() -> None:
    fields = SamplingParams(max_tokens=5, stop=["x"], top_k=-1, num_samples=2, seed=3).vllm_fields()

    assert fields["n"] == 2 and fields["max_tokens"] == 5 and fields["seed"] == 3 and fields["top_k"] == 0
    assert fields["stop"] == ["x"] and fields["stop_token_ids"] == [] and fields["ignore_eos"]
    assert SamplingParams(stop=[7]).vllm_fields()["stop_token_ids"] == [7]
    assert not SamplingParams().vllm_fields()["ignore_eos"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = make_text_model(tmp_path_factory.mktemp("tiny") / "model")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_params_drive_transformers_generate(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    prompt = torch.tensor([tokenizer("The quick")["input_ids"]])
    greedy = SamplingParams(temperature=0, max_tokens=6, stop=[])
    drawn = SamplingParams.from_dict({"max_new_tokens": 4, "num_samples": 3, "top_p": 0.9, "stop": []})

    first = model.generate(prompt, **greedy.to_transformers(tokenizer)).sequences[0, prompt.shape[1] :].tolist()
    several = model.generate(prompt, **drawn.to_transformers(tokenizer)).sequences
    stopped = SamplingParams(temperature=0, max_tokens=6, stop=[first[1]])
    short = model.generate(prompt, **stopped.to_transformers(tokenizer)).sequences[0, prompt.shape[1] :].tolist()

    assert len(first) == 6 and several.shape == (3, prompt.shape[1] + 4)
    assert short == first[: first.index(first[1]) + 1]
    assert SamplingParams().to_transformers()["max_new_tokens"] == 2048
    with pytest.raises(InvalidInput, match="stop: holds texts, which need the model's tokenizer"):
        SamplingParams(stop="x").to_transformers()


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": "x"},
        {"stop": 5},
        {"stop": [1.5]},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_p": None},
        {"max_tokens": "8"},
        {"num_samples": 2.0},
        {"top_k": None},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_parameter_of_another_kind_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"^{next(iter(wrong))}: is .*; send "):
        SamplingParams(**wrong)
