"""What a caller asks of the sampler, and what it gets back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from twinkle.core.errors import InvalidInput, UserError
from twinkle.core.pictures import PictureRules
from twinkle.model.pictures import Picture, check_pictures
from twinkle.module.lora import LoraAdapter
from twinkle.sampler.choice import ChoiceRule

DecodeText = Callable[[Sequence[int]], str]
StopReason = Literal["stop", "length"]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

SENTINEL_TOKEN = 0
SENTINEL_LOGPROB = -99999.0


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """An adapter as the files of a PEFT directory, for a backend that loads such files itself."""

    files: Mapping[str, bytes]


Adapter = LoraAdapter | AdapterFiles


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRequest:
    """One prompt to continue ``num_samples`` times, and the scores wanted of the prompt itself.

    The adapter is read while the request runs: pass one whose weights stay as they are until it is done.
    """

    key: str
    adapter: Adapter | None
    prompt: tuple[int, ...]
    seed: int
    num_samples: int = 1
    max_tokens: int | None = None
    """None: until the context ends. 0: only score the prompt."""
    temperature: float = 1.0
    """0 is greedy; logprobs are then those at temperature 1."""
    top_k: int = -1
    """-1 or 0: off."""
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    """1: off. Of the tokens of prompt and sample: above 1 makes them less likely, below more."""
    stop_token_ids: frozenset[int] | None = None
    """None: the model's end-of-sequence ids, unless other stops are given. Empty: no stop at all."""
    stop_strings: tuple[str, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    """Of ``prompt_logprobs`` and ``topk_prompt_logprobs``, fill only the last n positions."""
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: npt.NDArray[np.int64] | None = None
    """Ids [L-1, K] to score: row i at prompt position i+1; -1 asks for nothing."""
    prompt_alt_tokens_k: int = 0
    """Draw so many alternatives for every prompt position but the first, at ``temperature``."""
    pictures: tuple[Picture, ...] = ()
    """In the order of their tokens, each of which is in ``prompt`` the model's token for pictures."""
    cache_group: str = ""
    """What is computed of the prompt is shared with requests of the same group, and with no other."""


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The k likeliest tokens per position, [n, k] both; a row nobody asked for holds token 0 and -99999.0."""

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True, eq=False)
class DrawnSequence:
    """One continuation; what made it stop is part of it."""

    tokens: Int32Array
    logprobs: Float32Array
    """Of the temperature-scaled distribution, before top-k and top-p."""
    stop_reason: StopReason
    topk: TopLogprobs | None = None


@dataclass(frozen=True, eq=False)
class SampleResult:
    """All continuations of one request, in sample order, and the scores of its prompt (at temperature 1)."""

    key: str
    sequences: tuple[DrawnSequence, ...]
    prompt_logprobs: Float32Array | None = None
    """[L]; NaN at position 0 and wherever nothing was asked."""
    topk_prompt_logprobs: TopLogprobs | None = None
    """[L, k]."""
    target_prompt_logprobs: Float32Array | None = None
    """[L-1, K], 0.0 where the id was -1."""
    prompt_alt_tokens: TopLogprobs | None = None
    """[L-1, k], in the order drawn, with their logprobs at the request's temperature."""
    num_cached_tokens: int = 0
    """Of the prompt, computed for an earlier request of the same group."""


def rule_of(request: SampleRequest, barred: tuple[int, ...]) -> ChoiceRule:
    """How the tokens of a request are chosen, on a model some of whose tokens are never drawn."""
    return ChoiceRule(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, barred=barred)


def seen_by(request: SampleRequest, tokens: Sequence[int]) -> Sequence[int]:
    """What a penalty on repetitions goes by, with these tokens of a sample; nothing where there is none."""
    return () if request.repetition_penalty == 1 else (*request.prompt, *tokens)


def check_request(
    request: SampleRequest,
    *,
    vocab_size: int,
    max_length: int,
    can_decode: bool,
    picture_rules: PictureRules | None = None,
) -> None:
    """Raises InvalidInput that names the first field outside its limits."""
    _check_prompt(request, vocab_size, max_length)
    check_pictures("prompt", np.array(request.prompt), request.pictures, picture_rules)
    _check_choice(request)
    _check_stops(request, vocab_size, can_decode)
    _check_scores(request, vocab_size)


def not_finite(request: SampleRequest) -> UserError:
    """Returns the error of a request whose logits are NaN or infinite."""
    whose = "the base model" if request.adapter is None else "the adapter"
    return UserError(
        f"sample request {request.key}: {whose} gave NaN or infinite logits for this prompt; if it diverged in "
        "training, load an earlier checkpoint or train with a lower learning rate",
        key=request.key,
    )


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidInput(field, message)


def _check_prompt(request: SampleRequest, vocab_size: int, max_length: int) -> None:
    num_tokens = len(request.prompt)
    _require(num_tokens > 0, "prompt", "is empty; send at least one token")
    _require(
        num_tokens <= max_length,
        "prompt",
        f"has {num_tokens} tokens but the context holds {max_length}; shorten the prompt",
    )
    worst = min(request.prompt) if min(request.prompt) < 0 else max(request.prompt)
    _require(
        0 <= worst < vocab_size,
        "prompt",
        f"token {worst} is outside the vocabulary of {vocab_size}; use this model's tokenizer",
    )


def _check_choice(request: SampleRequest) -> None:
    _require(request.num_samples >= 1, "num_samples", f"is {request.num_samples}; ask for 1 or more")
    _require(
        request.max_tokens is None or request.max_tokens >= 0,
        "max_tokens",
        f"is {request.max_tokens}; send 0 or more, or leave it out to go on until the context ends",
    )
    _require(
        math.isfinite(request.temperature) and request.temperature >= 0,
        "temperature",
        f"is {request.temperature}; send a finite number, 0 (greedy) or more",
    )
    _require(request.top_k >= -1, "top_k", f"is {request.top_k}; send 1 or more, or -1 to switch it off")
    _require(0 < request.top_p <= 1, "top_p", f"is {request.top_p}; send a number above 0, up to 1 (off)")
    _require(
        math.isfinite(request.repetition_penalty) and request.repetition_penalty > 0,
        "repetition_penalty",
        f"is {request.repetition_penalty}; send a number above 0; 1 is off",
    )


def _check_stops(request: SampleRequest, vocab_size: int, can_decode: bool) -> None:
    ids = set(request.stop_token_ids or ()).union(*request.stop_sequences)
    outside = sorted(token for token in ids if not 0 <= token < vocab_size)
    _require(not outside, "stop", f"token {outside[:1]} is outside the vocabulary of {vocab_size}")
    _require(all(request.stop_strings), "stop", "an empty string would stop before the first token; leave it out")
    _require(all(request.stop_sequences), "stop", "an empty token sequence would stop at once; leave it out")
    _require(
        can_decode or not request.stop_strings,
        "stop",
        "this model has no tokenizer here, so strings cannot be matched; send token ids",
    )


def _check_scores(request: SampleRequest, vocab_size: int) -> None:
    for field, k in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs),
        ("topk_sample_logprobs", request.topk_sample_logprobs),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k),
    ):
        _require(0 <= k <= vocab_size, field, f"is {k}; send 0 (off) to {vocab_size}")
    last_n = request.prompt_logprobs_last_n
    _require(last_n is None or last_n >= 0, "prompt_logprobs_last_n", f"is {last_n}; send 0 or more, or leave it out")
    ids = request.target_prompt_logprobs
    if ids is None:
        return
    rows = len(request.prompt) - 1
    _require(
        ids.ndim == 2 and ids.shape[0] == rows,
        "target_prompt_logprobs",
        f"has shape {ids.shape}; send ({rows}, K): a row for every prompt token but the first",
    )
    _require(
        ids.size == 0 or (int(ids.min()) >= -1 and int(ids.max()) < vocab_size),
        "target_prompt_logprobs",
        f"holds ids outside -1 .. {vocab_size - 1}; use -1 where nothing is wanted",
    )
