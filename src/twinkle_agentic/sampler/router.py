"""A sampler that asks a stronger model where it is not sure itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.data_format.sampling import SampledSequence, SampleResponse, SampleResponses, SamplingParams
from twinkle_agentic.protocol.base import API
from twinkle_agentic.protocol.openai import TIMEOUT_S, OpenAI

MAX_THREADS = 16
NOT_SURE = {"entropy": 2.0, "logp": -2.0}

_log = event_log()


class RouterSampler:
    """Samples with a sampler of its own, and replaces each answer that is too uncertain by a stronger model's.

    An answer from elsewhere has no tokens and no logprobs of this model: ``tokens`` is empty, ``decoded`` and the last
    of ``new_input_feature["messages"]`` are its text. Where none comes, the uncertain answer stays, and the log says
    why. Rows that are tokens already have no text to send, and are never replaced.

    Args:
        sampler: Asked first, with a template set.
        fallback_endpoint: The stronger model's server, as ``http://host:port``; of OpenAI's protocol.
        fallback_model: Its name there.
        fallback_api_key: For it.
        method: ``entropy``: the mean over tokens of the entropy of the likeliest ones, uncertain above ``threshold``.
            ``logp``: the mean logprob of the drawn tokens, uncertain below.
        threshold: 2.0 for ``entropy``, -2.0 for ``logp`` if omitted.
        top_k_logprobs: How many of the likeliest tokens.
        fallback_temperature: Of the stronger model.
        fallback_max_tokens: Of its answer.
        timeout: Seconds to wait for it.
        api: In place of an address: anything that answers.
    """

    def __init__(
        self,
        sampler: Any,
        fallback_endpoint: str | None = None,
        fallback_model: str = "default",
        fallback_api_key: str = "",
        method: Literal["entropy", "logp"] = "entropy",
        threshold: float | None = None,
        top_k_logprobs: int = 10,
        fallback_temperature: float = 0.7,
        fallback_max_tokens: int = 4096,
        timeout: float = TIMEOUT_S,
        *,
        api: API | None = None,
    ) -> None:
        if method not in NOT_SURE:
            raise InvalidInput("method", f"is {method!r}; send one of {', '.join(NOT_SURE)}")
        if top_k_logprobs < 2:
            raise InvalidInput("top_k_logprobs", f"is {top_k_logprobs}; send 2 or more")
        if (fallback_endpoint is None) == (api is None):
            raise InvalidInput("fallback_endpoint", "or api must be given, and not both")
        self.sampler = sampler
        self._method = method
        self._threshold = NOT_SURE[method] if threshold is None else threshold
        self._top_k = top_k_logprobs
        self._params = SamplingParams(max_tokens=fallback_max_tokens, temperature=fallback_temperature)
        self._api = api or OpenAI(
            fallback_model,
            api_key=fallback_api_key or "none",
            base_url=f"{str(fallback_endpoint).rstrip('/').removesuffix('/v1')}/v1",
            client_kwargs={"timeout": timeout},
        )

    @property
    def template(self) -> Any:
        """The sampler's."""
        return self.sampler.template

    def set_template(self, *args: Any, **settings: Any) -> Any:
        """Set the sampler's."""
        return self.sampler.set_template(*args, **settings)

    def sample(
        self,
        inputs: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = "",
        adapter_path: str | None = None,
        **call: Any,
    ) -> SampleResponses:
        """One response for each row, as the sampler's; logprobs are those of the likeliest tokens."""
        rows = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        params = (
            sampling_params
            if isinstance(sampling_params, SamplingParams)
            else SamplingParams.from_dict(sampling_params or {})
        )
        params = replace(params, logprobs=max(self._top_k, params.logprobs or 0))
        responses = list(self.sampler.sample(rows, params, adapter_name, adapter_path=adapter_path, **call))
        wanted = [
            (response, number)
            for response, row in zip(responses, rows, strict=True)
            for number, sequence in enumerate(response.sequences)
            if _is_conversation(row) and self._is_uncertain(sequence)
        ]
        rows_of = {id(response): row for response, row in zip(responses, rows, strict=True)}
        answers: dict[tuple[int, int], SampledSequence] = {}
        with ThreadPoolExecutor(max_workers=MAX_THREADS) as threads:
            asked = [
                (response, number, threads.submit(self._ask, rows_of[id(response)])) for response, number in wanted
            ]
            for response, number, coming in asked:
                if (answer := coming.result()) is not None:
                    answers[id(response), number] = answer
        return SampleResponses(_replaced(response, answers) for response in responses)

    def _is_uncertain(self, sequence: SampledSequence) -> bool:
        if not sequence.logprobs:
            return True
        if self._method == "entropy":
            return mean_entropy(sequence.logprobs) > self._threshold
        return mean_logprob(sequence.logprobs, sequence.tokens) < self._threshold

    def _ask(self, row: Mapping[str, Any]) -> SampledSequence | None:
        try:
            message = self._api({"messages": row["messages"]}, self._params)
        except Exception as error:  # noqa: BLE001 - whatever an API raises leaves the answer that there is
            reason = f"{type(error).__name__}: {error}"
            _log.warning("router.failed", error=reason, next="the uncertain answer stays")
            return None
        said = message[0] if isinstance(message, list) else message
        answer = {"role": "assistant", "content": said.get("content") or ""}
        return SampledSequence(
            stop_reason="length" if said.get("finish_reason") == "length" else "stop",
            tokens=[],
            logprobs=None,
            decoded=answer["content"],
            new_input_feature={**row, "messages": [*row["messages"], answer]},
        )


def mean_entropy(logprobs: Sequence[Any]) -> float:
    """The mean over tokens of the entropy (nats) of the likeliest ones, as if there were no others."""
    entropies: list[float] = []
    for candidates in logprobs:
        values = [logprob for _, logprob in candidates]
        highest = max(values)
        weights = [math.exp(value - highest) for value in values]
        total = sum(weights)
        entropies.append(
            math.log(total)
            - sum(weight * (value - highest) for weight, value in zip(weights, values, strict=True)) / total
        )
    return sum(entropies) / len(entropies)


def mean_logprob(logprobs: Sequence[Any], tokens: Sequence[int]) -> float:
    """The mean logprob of the drawn tokens; of one that is not among the likeliest, that of the least likely."""
    drawn: list[float] = []
    for token, candidates in zip(tokens, logprobs, strict=True):
        known = dict(candidates)
        drawn.append(known.get(token, min(known.values())))
    return sum(drawn) / len(drawn)


def _is_conversation(row: Mapping[str, Any]) -> bool:
    return bool(row.get("messages")) and "input_ids" not in row


def _replaced(response: SampleResponse, answers: Mapping[tuple[int, int], SampledSequence]) -> SampleResponse:
    sequences = [answers.get((id(response), number), known) for number, known in enumerate(response.sequences)]
    return replace(response, sequences=sequences)
