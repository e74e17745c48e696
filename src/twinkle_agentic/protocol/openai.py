"""Chat completions of whatever speaks OpenAI's protocol: OpenAI itself, vLLM, SGLang, Ollama, or this service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinkle.core.errors import ConfigError
from twinkle.data_format.sampling import SamplingParams
from twinkle_agentic.protocol.base import API, Message

INSTALL = "pip install 'twinkle-queue[agents]'"
TIMEOUT_S = 120.0
MAX_RETRIES = 2


class OpenAI(API):
    """A model by its name at an address.

    A message has ``content`` (a text, perhaps empty) and where there are any ``reasoning_content``, ``tool_calls`` and
    ``finish_reason``. Parameters that OpenAI itself does not know (``top_k``, ``repetition_penalty``, tokens to stop
    at) go as vLLM and SGLang name them, and only where they are set: what does not know them says so.

    Args:
        model: Its name there.
        api_key: ``OPENAI_API_KEY`` if omitted.
        base_url: ``http://host:port/v1``; ``OPENAI_BASE_URL``, else OpenAI's own, if omitted.
        client_kwargs: Of ``openai.OpenAI``, above a time limit of 120 seconds and two further tries.

    Raises:
        ConfigError: The package ``openai`` is not installed, or there is no key.
    """

    def __init__(
        self,
        model: str,
        api_key: str | None = None,
        base_url: str | None = None,
        client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            # An extra: most rollouts have their model in this process.
            import openai  # noqa: PLC0415
        except ModuleNotFoundError:
            raise ConfigError(f"OpenAI's protocol needs the package openai: {INSTALL}") from None
        settings = {"timeout": TIMEOUT_S, "max_retries": MAX_RETRIES, **(client_kwargs or {})}
        try:
            self.client = openai.OpenAI(api_key=api_key, base_url=base_url, **settings)
        except openai.OpenAIError as error:
            raise ConfigError(f"api_key: {error}") from error
        self.model = model

    def __call__(
        self, trajectory: Mapping[str, Any], sampling_params: SamplingParams, **overrides: Any
    ) -> Message | list[Message]:
        """See :class:`API`; ``overrides`` are fields of the request, above ours."""
        body = {**_request(self.model, trajectory, sampling_params), **overrides}
        extra = {**_extras(sampling_params), **(body.pop("extra_body", None) or {})}
        create: Any = self.client.chat.completions.create
        answer = create(**body, **({"extra_body": extra} if extra else {}))
        messages = [_message(choice) for choice in answer.choices]
        return messages[0] if sampling_params.num_samples == 1 else messages


def _request(model: str, trajectory: Mapping[str, Any], params: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [_sent(message) for message in trajectory.get("messages") or ()],
        "n": params.num_samples,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    if trajectory.get("tools"):
        body["tools"] = list(trajectory["tools"])
    for name in ("max_tokens", "seed"):
        if getattr(params, name) is not None:
            body[name] = getattr(params, name)
    stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    if texts := [text for text in stop if isinstance(text, str)]:
        body["stop"] = texts
    if params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    return body


def _extras(params: SamplingParams) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if params.top_k > 0:
        extras["top_k"] = params.top_k
    if params.repetition_penalty != 1:
        extras["repetition_penalty"] = params.repetition_penalty
    stop = [] if isinstance(params.stop, str) else [token for token in params.stop or () if isinstance(token, int)]
    if stop:
        extras["stop_token_ids"] = stop
    return extras


def _sent(message: Mapping[str, Any]) -> Message:
    """The fields that the protocol knows; thinking is told to nobody."""
    known = ("role", "content", "name", "tool_calls", "tool_call_id")
    return {name: message[name] for name in known if message.get(name) is not None}


def _message(choice: Any) -> Message:
    answered = choice.message.model_dump(exclude_none=True)
    message: Message = {"role": "assistant", "content": answered.get("content") or ""}
    for name in ("reasoning_content", "tool_calls"):
        if answered.get(name):
            message[name] = answered[name]
    if choice.finish_reason:
        message["finish_reason"] = choice.finish_reason
    return message
