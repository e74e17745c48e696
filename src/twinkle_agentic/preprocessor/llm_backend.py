"""Models that filters ask: one in this process, or one behind an address."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.core.process.events import event_log
from twinkle.data_format.sampling import SamplingParams
from twinkle_agentic.protocol.openai import OpenAI

MAX_THREADS = 16
Messages = Sequence[Mapping[str, Any]]
Choice = dict[str, str]
"""``content``, and ``reasoning_content`` where there is one."""
Logprobs = list[float | None]
"""Of each token in turn after those before it, in nats; None of the first."""

_log = event_log()


class LLMBackend(ABC):
    """Answers, scores and embeds texts. One of one's own brings ``chat``, and what else its filters ask for."""

    @abstractmethod
    def chat(self, messages: Messages, *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1) -> list[Choice]:
        """``n`` answers to a conversation."""

    def chat_batch(
        self, messages_list: Sequence[Messages], *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1
    ) -> list[list[Choice]]:
        """The answers to many conversations, in their order; none to one that could not be answered."""
        return [self.chat(messages, temperature=temperature, max_tokens=max_tokens, n=n) for messages in messages_list]

    def prompt_logprobs(self, messages: Messages) -> Logprobs | None:
        """The logprobs of a conversation's tokens as the model's chat template writes them.

        Raises:
            ConfigError: This backend gives none.
        """
        raise ConfigError(f"{type(self).__name__} gives no logprobs of prompts; take SamplerBackend, or vLLM's server")

    def prompt_logprobs_ids(self, input_ids_list: Sequence[Sequence[int]]) -> list[Logprobs]:
        """The logprobs of tokens, of each of many prompts.

        Raises:
            ConfigError: This backend gives none.
        """
        raise ConfigError(f"{type(self).__name__} gives no logprobs of prompts; take SamplerBackend, or vLLM's server")

    def embeddings(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """A row for each text.

        Raises:
            ConfigError: This backend gives none.
        """
        raise ConfigError(f"{type(self).__name__} gives no embeddings; take OpenAIBackend with a model of embeddings")


class OpenAIBackend(LLMBackend):
    """A model of a server that speaks OpenAI's protocol.

    Logprobs of prompts are vLLM's and SGLang's addition to it (``prompt_logprobs``); a server without them is refused
    when it is asked.

    Args:
        endpoint: ``http://host:port`` or with ``/v1``.
        model: Its name there.
        api_key: For it.
        timeout: Seconds to wait for an answer.

    Raises:
        ConfigError: The package ``openai`` is not installed (``twinkle-queue[agents]``).
    """

    def __init__(self, endpoint: str, model: str = "default", api_key: str = "", timeout: float = 120.0) -> None:
        if not endpoint:
            raise InvalidInput("endpoint", "is empty; send the server's address, as http://host:port/v1")
        self._api = OpenAI(
            model,
            api_key=api_key or "none",
            base_url=f"{endpoint.rstrip('/').removesuffix('/v1')}/v1",
            client_kwargs={"timeout": timeout},
        )

    @property
    def model(self) -> str:
        """Its name."""
        return self._api.model

    def chat(self, messages: Messages, *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1) -> list[Choice]:
        """See :class:`LLMBackend`."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, num_samples=n)
        said = self._api({"messages": list(messages)}, params)
        return [_choice(message) for message in (said if isinstance(said, list) else [said])]

    def chat_batch(
        self,
        messages_list: Sequence[Messages],
        *,
        temperature: float = 0.0,
        max_tokens: int = 16,
        n: int = 1,
        max_workers: int = MAX_THREADS,
    ) -> list[list[Choice]]:
        """See :class:`LLMBackend`; ``max_workers`` at once. What fails is told in the log and has no answers.

        Raises:
            Exception: That of the last conversation, if none of several could be answered.
        """
        if max_workers < 1:
            raise InvalidInput("max_workers", f"is {max_workers}; send 1 or more")
        answers: list[list[Choice]] = []
        failed: Exception | None = None
        with ThreadPoolExecutor(max_workers=max_workers) as threads:
            coming = [
                threads.submit(self.chat, messages, temperature=temperature, max_tokens=max_tokens, n=n)
                for messages in messages_list
            ]
            for number, one in enumerate(coming):
                try:
                    answers.append(one.result())
                except Exception as error:  # noqa: BLE001 - whatever one request raises, the others' answers count
                    reason = f"{type(error).__name__}: {error}"
                    _log.warning("backend.failed", conversation=number, error=reason, next="it has no answer")
                    answers.append([])
                    failed = error
        if failed is not None and not any(answers):
            raise failed
        return answers

    def prompt_logprobs(self, messages: Messages) -> Logprobs | None:
        """See :class:`LLMBackend`."""
        create: Any = self._api.client.chat.completions.create
        answer = create(
            model=self.model, messages=list(messages), max_tokens=1, extra_body={"prompt_logprobs": 0}
        ).model_dump()
        return _logprobs(answer.get("prompt_logprobs"), None)

    def prompt_logprobs_ids(self, input_ids_list: Sequence[Sequence[int]]) -> list[Logprobs]:
        """See :class:`LLMBackend`."""
        prompts = [list(map(int, ids)) for ids in input_ids_list]
        if not prompts:
            return []
        create: Any = self._api.client.completions.create
        answer = create(model=self.model, prompt=prompts, max_tokens=1, extra_body={"prompt_logprobs": 0})
        choices = sorted(answer.model_dump()["choices"], key=lambda choice: choice["index"])
        return [_logprobs(one.get("prompt_logprobs"), ids) for one, ids in zip(choices, prompts, strict=True)]

    def embeddings(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """See :class:`LLMBackend`."""
        answer = self._api.client.embeddings.create(model=self.model, input=list(texts))
        rows = sorted(answer.data, key=lambda row: row.index)
        return np.array([row.embedding for row in rows], dtype=np.float32)


class SamplerBackend(LLMBackend):
    """A sampler of this library: in this process, on Ray, or a service's.

    Args:
        sampler: With a template set where conversations are sent to it.
        embed_endpoint: A server of OpenAI's protocol for embeddings, which a sampler has none of.
        embed_model: Its model's name there.
    """

    def __init__(self, sampler: Any, embed_endpoint: str = "", embed_model: str = "bge-m3") -> None:
        self.sampler = sampler
        self._embedder = OpenAIBackend(embed_endpoint, embed_model) if embed_endpoint else None

    def chat(self, messages: Messages, *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1) -> list[Choice]:
        """See :class:`LLMBackend`."""
        return self.chat_batch([messages], temperature=temperature, max_tokens=max_tokens, n=n)[0]

    def chat_batch(
        self, messages_list: Sequence[Messages], *, temperature: float = 0.0, max_tokens: int = 16, n: int = 1
    ) -> list[list[Choice]]:
        """See :class:`LLMBackend`; in one call of the sampler."""
        if not messages_list:
            return []
        params = {"temperature": temperature, "max_tokens": max_tokens, "num_samples": n}
        responses = self.sampler.sample([{"messages": list(messages)} for messages in messages_list], params)
        return [[_choice(said_message(sequence)) for sequence in response["sequences"]] for response in responses]

    def prompt_logprobs(self, messages: Messages) -> Logprobs | None:
        """See :class:`LLMBackend`."""
        row = self.sampler.template.encode({"messages": list(messages)})
        return self.prompt_logprobs_ids([list(map(int, row["input_ids"]))])[0]

    def prompt_logprobs_ids(self, input_ids_list: Sequence[Sequence[int]]) -> list[Logprobs]:
        """See :class:`LLMBackend`; in one call of the sampler."""
        if not input_ids_list:
            return []
        prompts = [{"input_ids": list(ids)} for ids in input_ids_list]
        responses = self.sampler.sample(prompts, {"max_tokens": 0, "prompt_logprobs": 0})
        return [list(response["prompt_logprobs"]) for response in responses]

    def embeddings(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """See :class:`LLMBackend`."""
        if self._embedder is None:
            raise ConfigError("embed_endpoint is missing: a sampler gives no embeddings; send a server's that does")
        return self._embedder.embeddings(texts)


def backend_of(model: Any) -> LLMBackend:
    """A backend as it is, a sampler as one."""
    return model if isinstance(model, LLMBackend) else SamplerBackend(model)


def chosen_backend(backend: Any, *, api_endpoint: str, model: str, api_key: str = "") -> LLMBackend:
    """The one that is sent, else the one that is at the address.

    Raises:
        InvalidInput: There is neither.
    """
    if backend is None and not api_endpoint:
        raise InvalidInput("backend", "is missing; send a sampler, a backend, or an api_endpoint")
    return OpenAIBackend(api_endpoint, model, api_key) if backend is None else backend_of(backend)


def said_message(sequence: Any) -> Mapping[str, Any]:
    """The message that was sampled, without the tokens that end it where the sampler tells the message."""
    messages = (sequence.get("new_input_feature") or {}).get("messages") or []
    said: Mapping[str, Any] = messages[-1] if messages else {"content": sequence.get("decoded") or ""}
    return said


def _choice(message: Mapping[str, Any]) -> Choice:
    choice = {"content": str(message.get("content") or "")}
    if message.get("reasoning_content"):
        choice["reasoning_content"] = str(message["reasoning_content"])
    return choice


def _logprobs(given: Any, ids: Sequence[int] | None) -> Logprobs:
    """vLLM's: of each token an object by token id, that of the prompt first among others of a higher rank."""
    if not isinstance(given, Sequence):
        raise ConfigError("the server gives no prompt_logprobs; vLLM's and SGLang's do")
    values: Logprobs = []
    for number, candidates in enumerate(given):
        if not candidates:
            values.append(None)
            continue
        token = next(iter(candidates)) if ids is None else str(ids[number])
        found = candidates.get(token, next(iter(candidates.values())))
        values.append(float(found["logprob"] if isinstance(found, Mapping) else found))
    return values
