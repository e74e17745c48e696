"""Samplers at a server, under the names that training scripts use."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from twinkle.core.model_names import plain_model_name
from twinkle.data_format.answers import Answer
from twinkle.data_format.sampling import SampledSequence, SampleResponses, SamplingParams
from twinkle_client import answers
from twinkle_client.arguments import component_name, config_text
from twinkle_client.connection import Connection, current
from twinkle_client.endpoint import model_path
from twinkle_client.errors import BadAnswer, CallFailed
from twinkle_client.futures import CallFuture, Crowd, HandOver, Lane, Remote, blocking

Row = Mapping[str, Any] | Sequence[int]
Params = SamplingParams | Mapping[str, Any] | None


class SamplerCalls:
    """The calls of a sampler, each as a future; ``sampler.submit.sample(rows)`` takes what ``sampler.sample`` takes.

    Samples are handed over side by side, so none waits for the one before; wait for a template before you sample by it.
    """

    def __init__(self, path: str, hand_over: HandOver, *, draw: HandOver) -> None:
        """Made by a sampler; ``path`` is where its calls go, ``hand_over`` how, and ``draw`` how samples do."""
        self._path = path
        self._hand_over = hand_over
        self._draw = draw

    def sample(
        self,
        /,
        inputs: Sequence[Row] | Row,
        sampling_params: Params = None,
        adapter_name: str = "",
        adapter_uri: str | None = None,
        num_samples: int | None = None,
        *,
        adapter_path: str | None = None,
        return_encoded: bool = False,
        use_base_model: bool = False,
        **options: Any,
    ) -> CallFuture[SampleResponses]:
        """Continue every row.

        Args:
            inputs: Rows with ``input_ids``, token ids, or conversations if a template is set; or one of these.
            sampling_params: The same for all rows.
            adapter_name: One that this session trains or has added; empty for the base model.
            adapter_uri: A checkpoint's path (what ``model.save`` gave) instead of a name.
            num_samples: The old form: how many of each row, above the params; logprobs come back unasked, as numbers.
            adapter_path: Another word for ``adapter_uri``.
            return_encoded: Taken for the sake of old scripts; every ``new_input_feature`` holds its tokens.
            use_base_model: Sample the base model whatever the adapter.
            options: For the server.

        Returns:
            One response for each row, in their order; ``.sequences`` and ``["sequences"]`` have those of all rows.
        """
        params = _fields(sampling_params)
        is_old_form = num_samples is not None and params.get("logprobs") is None
        if num_samples is not None:
            params = {**params, "num_samples": num_samples}
        uri = adapter_uri or adapter_path
        arguments = {
            "inputs": _rows(inputs),
            "sampling_params": {**params, "logprobs": 1} if is_old_form else params or None,
            "adapter_name": "" if use_base_model else adapter_name,
            "num_samples": params.get("num_samples", 1),
            **({"adapter_uri": str(uri)} if uri and not use_base_model else {}),
            **options,
        }
        read: Callable[[Any], SampleResponses] = _with_plain_logprobs if is_old_form else answers.samples
        return self._draw(f"{self._path}/sample", arguments, read)

    def set_template(self, /, template_cls: Any, adapter_name: str = "", **settings: Any) -> CallFuture[None]:
        """Set what turns conversations into prompts, by the name of one of the server's classes."""
        arguments = {"template_cls": component_name("template_cls", template_cls), "adapter_name": adapter_name}
        return self._hand_over(f"{self._path}/set_template", {**arguments, **settings}, answers.nothing)

    def add_adapter_to_sampler(self, /, adapter_name: str, config: object, **settings: Any) -> CallFuture[Answer]:
        """Add an adapter by its config, to be sampled by its name."""
        arguments = {"adapter_name": adapter_name, "config": config_text(config), **settings}
        return self._hand_over(f"{self._path}/add_adapter_to_sampler", arguments, answers.mapping)

    def apply_patch(self, /, patch_cls: Any, adapter_name: str = "", **settings: Any) -> CallFuture[None]:
        """Change the model by one of the server's patches."""
        arguments = {"patch_cls": component_name("patch_cls", patch_cls), "adapter_name": adapter_name, **settings}
        return self._hand_over(f"{self._path}/apply_patch", arguments, answers.nothing)


class VLLMSampler(Remote[SamplerCalls]):
    """What samples at a server, by vLLM or by the server's own sampler: no call shows which.

    Every call waits for its outcome; the same calls under ``submit`` give futures.

    Args:
        model_id: What the server calls the base model; ``ms://`` and ``hf://`` before it say nothing.
        connection: To the server; that of ``init_twinkle_client`` if omitted.
        settings: What the class of the library has more (``engine_args``, ``device_mesh``, ...) is the server's to
            choose; they are not sent, with a warning.
    """

    def __init__(self, model_id: str, *, connection: Connection | None = None, **settings: Any) -> None:
        connection = current() if connection is None else connection
        self.model_id = plain_model_name(model_id)
        if settings:
            warnings.warn(f"{', '.join(settings)}: the server chooses this, it is not sent", stacklevel=2)
        path = model_path("sampler", model_id)
        lane, crowd = Lane(connection), Crowd(connection)
        super().__init__(
            connection,
            submit=SamplerCalls(path, lane.submit, draw=crowd.submit),
            here=SamplerCalls(path, lane.send, draw=crowd.send),
        )
        self._path = path
        connection.call(f"{path}/create", {})

    sample = blocking(SamplerCalls.sample)
    set_template = blocking(SamplerCalls.set_template)
    add_adapter_to_sampler = blocking(SamplerCalls.add_adapter_to_sampler)
    apply_patch = blocking(SamplerCalls.apply_patch)

    def sample_stream(
        self,
        inputs: Sequence[Row] | Row,
        sampling_params: Params = None,
        adapter_name: str = "",
        adapter_uri: str | None = None,
        **options: Any,
    ) -> Iterator[tuple[str, str | None]]:
        """Continue one row and yield ``(text, None)`` as it grows, at last ``(rest, stop_reason)``.

        It is sent once: a stream that breaks is an error, and what was drawn of it is gone.
        """
        arguments = {
            "inputs": _rows(inputs),
            "sampling_params": _fields(sampling_params) or None,
            "adapter_name": adapter_name,
            **({"adapter_uri": str(adapter_uri)} if adapter_uri else {}),
            **options,
        }
        with self.connection.stream(f"{self._path}/sample_stream", arguments) as response:
            for line in response.iter_lines():
                if line.strip():
                    yield _piece(line)


vLLMSampler = VLLMSampler  # noqa: N816 - the name that scripts use
TorchSampler = VLLMSampler
"""Which of the two a server samples with is its own affair."""


def _rows(inputs: Sequence[Row] | Row) -> list[Any]:
    if isinstance(inputs, Mapping) or (len(inputs) > 0 and isinstance(inputs[0], int)):
        return [_row(inputs)]
    return [_row(row) for row in inputs]


def _row(row: Any) -> Any:
    return row if isinstance(row, Mapping) else {"input_ids": row}


def _fields(params: Params) -> dict[str, Any]:
    if isinstance(params, SamplingParams):
        named = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    else:
        named = dict(params or {})
    return {name: value for name, value in named.items() if value is not None}


def _with_plain_logprobs(answer: Any) -> SampleResponses:
    """Of a call in the old form: the chosen tokens' logprobs as numbers."""
    return SampleResponses(
        dataclasses.replace(response, sequences=[_plain(sequence) for sequence in response.sequences])
        for response in answers.samples(answer)
    )


def _plain(sequence: SampledSequence) -> SampledSequence:
    logprobs = sequence.logprobs or []
    return dataclasses.replace(sequence, logprobs=[_number(logprob) for logprob in logprobs])


def _number(logprob: Any) -> float:
    return float(logprob if isinstance(logprob, int | float) else logprob[0][1])


def _piece(line: str) -> tuple[str, str | None]:
    try:
        fields = json.loads(line)
    except ValueError:
        raise BadAnswer("sample_stream: a line of the answer is no JSON") from None
    if "delta" not in fields:
        words = fields.get("detail", fields.get("error", "the stream ended in an error"))
        raise CallFailed(str(words), status=200, code=str(fields.get("code", "")))
    return str(fields["delta"]), fields.get("finish_reason")
