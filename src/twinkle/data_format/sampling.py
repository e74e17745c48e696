"""How to sample, and what comes back: the library's plain values, without tensors."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal

from twinkle.core.errors import InvalidInput
from twinkle.core.keywords import known_keywords
from twinkle.data_format.answers import Dumped

StopReason = Literal["length", "stop", "abort", "error"]
TokenLogprob = tuple[int, float]

LARGEST_WHOLE = 2**53
"""Among numbers that need not be whole: larger ones are no floats."""
MAX_TOKENS_ALIAS = "max_new_tokens"
DEFAULT_MAX_NEW_TOKENS = 2048
"""Of transformers' ``generate``, which does not go on until the context ends."""


@dataclass(frozen=True)
class SamplingParams:
    """How continuations are drawn.

    Raises:
        InvalidInput: A value is outside its range; names the field.
    """

    max_tokens: int | None = None
    """None: until the context ends. 0: only score the prompt."""
    seed: int | None = None
    """None: drawn anew for every call."""
    stop: str | Sequence[str] | Sequence[int] | None = None
    """None: the model's end-of-text tokens. An empty list: no stop at all."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """-1 or 0: off."""
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    """1: that of each chosen token. k above 1: those of the k likeliest tokens. None: none."""
    prompt_logprobs: int | None = None
    """0: that of each prompt token. k: also those of the k likeliest tokens at each place. None: none."""
    num_samples: int = 1

    def __post_init__(self) -> None:
        values = vars(self)
        for name in ("max_tokens", "seed", "top_k", "logprobs", "prompt_logprobs", "num_samples"):
            value = values[name]
            may_be_none = name not in ("top_k", "num_samples")
            _require(isinstance(value, Integral) or (value is None and may_be_none), name, value, "a whole number")
        for name in ("temperature", "top_p", "repetition_penalty"):
            _require(_is_number(values[name]), name, values[name], "a number")
        _require(
            self.stop is None
            or isinstance(self.stop, str)
            or (isinstance(self.stop, Sequence) and all(isinstance(one, str | Integral) for one in self.stop)),
            "stop",
            self.stop,
            "a text, or a list of texts or of token ids",
        )
        _require(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more, or None")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number, 0 (greedy) or more",
        )
        _require(self.top_k >= -1, "top_k", self.top_k, "1 or more, or -1 (off)")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1 (off)")
        _require(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0; 1 is off",
        )
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "1 or more, or None")
        _require(
            self.prompt_logprobs is None or self.prompt_logprobs >= 0,
            "prompt_logprobs",
            self.prompt_logprobs,
            "0 or more, or None",
        )
        _require(self.num_samples >= 1, "num_samples", self.num_samples, "1 or more")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The params that a script's mapping describes; unknown names are left out, and the log names them.

        Raises:
            InvalidInput: A name is given twice, or its value out of range.
        """
        known = [field.name for field in fields(cls)]
        return cls.from_exactly(known_keywords("SamplingParams.from_dict", values, (*known, MAX_TOKENS_ALIAS)))

    @classmethod
    def from_exactly(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the params that a mapping describes; ``max_new_tokens`` is another name of ``max_tokens``.

        Raises:
            InvalidInput: A name is unknown (with the nearest known one), given twice, or its value out of range.
        """
        known = [field.name for field in fields(cls)]
        given = dict(values)
        if MAX_TOKENS_ALIAS in given:
            if "max_tokens" in given:
                raise InvalidInput(MAX_TOKENS_ALIAS, "is another name of max_tokens; send one of them")
            given["max_tokens"] = given.pop(MAX_TOKENS_ALIAS)
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise InvalidInput("sampling_params", f"has no {name}; {hint}")
        return cls(**given)

    def to_vllm(self, **settings: Any) -> Any:
        """The same as vLLM's own ``SamplingParams``; ``settings`` are further fields of theirs.

        Raises:
            InvalidInput: vLLM is not installed.
        """
        try:
            # It is an extra, and takes seconds to import.
            from vllm import SamplingParams as VllmParams  # noqa: PLC0415
        except ImportError as error:
            raise InvalidInput(
                "sampling_params", "cannot be vLLM's without it; pip install 'twinkle-queue[vllm]'"
            ) from error
        return VllmParams(**{**self.vllm_fields(), **settings})

    def vllm_fields(self) -> dict[str, Any]:
        """The arguments of vLLM's ``SamplingParams``."""
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        return {
            "n": self.num_samples,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "top_k": max(self.top_k, 0),
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "stop": [text for text in stop if isinstance(text, str)],
            "stop_token_ids": [token for token in stop if isinstance(token, int)],
            # Stops of one's own take the place of the model's.
            "ignore_eos": self.stop is not None,
        }

    def to_transformers(self, tokenizer: Any = None) -> dict[str, Any]:
        """Keyword arguments of transformers' ``generate``.

        Args:
            tokenizer: Of the model: for its end and padding tokens, and where ``stop`` holds texts.

        Raises:
            InvalidInput: ``stop`` holds texts, and no tokenizer is given.
        """
        is_greedy = self.temperature == 0
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        texts = [text for text in stop if isinstance(text, str)]
        if texts and tokenizer is None:
            raise InvalidInput("stop", "holds texts, which need the model's tokenizer; pass it")
        settings: dict[str, Any] = {
            "max_new_tokens": DEFAULT_MAX_NEW_TOKENS if self.max_tokens is None else self.max_tokens,
            "do_sample": not is_greedy,
            "num_return_sequences": self.num_samples,
            "repetition_penalty": self.repetition_penalty,
            "output_logits": self.logprobs is not None,
            "return_dict_in_generate": True,
        }
        if not is_greedy:
            settings |= {"temperature": self.temperature, "top_k": max(self.top_k, 0), "top_p": self.top_p}
        if texts:
            settings |= {"stop_strings": texts, "tokenizer": tokenizer}
        tokens = [token for token in stop if isinstance(token, int)]
        if tokens:
            settings["eos_token_id"] = tokens
        elif tokenizer is not None and self.stop is None:
            settings["eos_token_id"] = tokenizer.eos_token_id
        if tokenizer is not None:
            settings["pad_token_id"] = (
                tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            )
        return settings


class Keyed(Dumped):
    """Answers to keys as well as to attributes: scripts of both generations read results, either way."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def get(self, name: str, default: Any = None) -> Any:
        """The field of that name, or the default where there is none."""
        return getattr(self, name) if name in self.keys() else default

    def keys(self) -> list[str]:
        """The names of the fields."""
        return [field.name for field in fields(self)]  # type: ignore[arg-type]

    def model_dump(self) -> dict[str, Any]:
        """The fields by name, those of sequences too."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class SampledSequence(Keyed):
    """One continuation; what made it stop is part of it."""

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[list[TokenLogprob]] | list[float] | None = None
    """For each token (id, logprob) pairs: of the chosen token alone, or of the k likeliest, likeliest first.

    A call in the old form (``num_samples=`` beside the params) that asked for none has the chosen tokens' as numbers.
    """
    decoded: str | None = None
    """The text of the tokens, special ones included, if the sampler has a tokenizer."""
    new_input_feature: dict[str, Any] | None = None
    """The prompt's row with this continuation appended, ready to be trained on."""
    routed_experts: Any = None
    """The experts that each token went to, of a sampler of one's own that says so; ours do not."""


@dataclass(frozen=True)
class SampleResponse(Keyed):
    """All continuations of one prompt, and the scores of the prompt itself."""

    sequences: list[SampledSequence]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    """One for each prompt token; nothing precedes the first."""
    topk_prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    weights_version: int | None = None
    """Of a sampler that a training keeps in step: the number of the last sync that it had; 0 before any."""


class SampleResponses(list[SampleResponse]):
    """One response for each prompt, in their order; and all their sequences in a row, as the old form has them."""

    def __init__(self, responses: Iterable[SampleResponse] = ()) -> None:
        super().__init__(responses)

    @property
    def sequences(self) -> list[SampledSequence]:
        """The sequences of all prompts, those of the first one first."""
        return [sequence for response in self for sequence in response.sequences]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            if index != "sequences":
                raise KeyError(index)
            return self.sequences
        return super().__getitem__(index)

    def get(self, name: str, default: Any = None) -> Any:
        """``sequences``, or the default for any other name."""
        return self.sequences if name == "sequences" else default


def _is_number(value: object) -> bool:
    return abs(value) <= LARGEST_WHOLE if isinstance(value, int) else isinstance(value, Real)


def _require(condition: bool, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise InvalidInput(field, f"is {value}; send {wanted}")
