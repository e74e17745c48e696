"""Bodies of the Twinkle dialect's sampler."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from twinkle.wire.bodies.base import Identifier, PathText, RequestBody, Text
from twinkle.wire.bodies.twinkle import TwinkleBody

MAX_INPUTS = 1024

Row: TypeAlias = dict[str, Any] | list[int]


def _in_a_list(value: object) -> object:
    """One row alone, or its bare token ids, is a list of one."""
    if isinstance(value, dict) or (isinstance(value, list) and value and all(type(token) is int for token in value)):
        return [value]
    return value


def _empty(value: object) -> object:
    return "" if value is None else value


AdapterNameText = Annotated[Text, BeforeValidator(_empty, json_schema_input_type=Text | None)]
Inputs = Annotated[
    list[Row],
    Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
    BeforeValidator(_in_a_list, json_schema_input_type=Row | list[Row]),
]


class SamplerCreateRequest(RequestBody):
    """``POST sampler/{model}/twinkle/create``: nothing needs to be made."""


class SetSamplerTemplateRequest(RequestBody):
    """``POST .../set_template``; what else it holds are the template's settings."""

    template_cls: Identifier
    adapter_name: AdapterNameText = ""
    model_id: Text | None = None


class AddSamplerAdapterRequest(RequestBody):
    """``POST .../add_adapter_to_sampler``: the weights are those of the session's adapter, whatever the config says."""

    adapter_name: Identifier
    config: Any = None


class SamplerPatchRequest(RequestBody):
    """``POST .../apply_patch``."""

    patch_cls: Text | None = None
    adapter_name: AdapterNameText = ""


class TwinkleSampleRequest(RequestBody):
    """``POST .../sample`` and ``.../sample_stream``: rows with ``input_ids``, or conversations with ``messages``."""

    inputs: Inputs
    sampling_params: dict[str, Any] | None = None
    num_samples: int | None = Field(default=None, ge=1)
    adapter_name: AdapterNameText = ""
    adapter_uri: PathText | None = None


class SamplerAnswer(TwinkleBody):
    """It is ready."""

    status: Literal["ok"] = "ok"


class SamplerAdapterAnswer(SamplerAnswer):
    """It is known under this name, and under its name in the session."""

    adapter_name: str


class TwinkleSequence(TypedDict):
    """One continuation. A logprob stands with its token: of the chosen one, or of the k likeliest that were asked."""

    stop_reason: Literal["stop", "length"]
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    decoded: str | None
    new_input_feature: dict[str, Any]


class TwinkleSampled(TypedDict):
    """All continuations of one input, and the scores of the input itself."""

    sequences: list[TwinkleSequence]
    prompt_token_ids: list[int]
    prompt_logprobs: list[float | None] | None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None


class TwinkleSamples(TypedDict):
    """One entry for each input, in their order."""

    samples: list[TwinkleSampled]
    checkpoint: str | None
    """The path of what was sampled from; null for the base model, and for weights that an adapter has now."""
