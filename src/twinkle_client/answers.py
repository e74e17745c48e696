"""What calls of a model give back: for scripts of both generations, by key and by attribute, plain or ``.result``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinkle.data_format.answers import Answer, Dumped, MetricResults, ModelOutput
from twinkle.data_format.sampling import SampledSequence, SampleResponse, SampleResponses
from twinkle_client.errors import BadAnswer


class SaveResponse(str, Dumped):
    """The path of a checkpoint, as text: ``twinkle://<run>/weights/<name>``."""

    __slots__ = ("checkpoint_dir",)

    checkpoint_dir: str | None
    """Where it lies at the server, if the server says so."""

    def __new__(cls, twinkle_path: str, checkpoint_dir: str | None = None) -> SaveResponse:
        """Make the text, and note the folder beside it."""
        text = super().__new__(cls, twinkle_path)
        text.checkpoint_dir = checkpoint_dir
        return text

    def __reduce__(self) -> tuple[type[SaveResponse], tuple[str, str | None]]:
        """What a copy is made of."""
        return SaveResponse, (str(self), self.checkpoint_dir)

    @property
    def twinkle_path(self) -> str:
        """The path: what ``load`` and a sampler's ``adapter_uri`` take."""
        return str(self)

    def model_dump(self) -> dict[str, Any]:
        """The path and the folder."""
        return {"twinkle_path": str(self), "checkpoint_dir": self.checkpoint_dir}


class Loss(float, Dumped):
    """A loss; ``result`` is the number too."""

    def model_dump(self) -> dict[str, Any]:
        """``{"result": the number}``."""
        return {"result": self.result}

    @property
    def result(self) -> float:
        """The number."""
        return float(self)


class GradNorm(float, Dumped):
    """A gradient's norm before it was clipped; ``result`` is the server's text of it, as scripts expect."""

    @property
    def result(self) -> str:
        """The norm as text."""
        return repr(float(self))

    def model_dump(self) -> dict[str, Any]:
        """``{"result": the text}``."""
        return {"result": self.result}


class Text(str, Dumped):
    """A text; ``result`` is the text too."""

    __slots__ = ()

    def model_dump(self) -> dict[str, Any]:
        """``{"result": the text}``."""
        return {"result": str(self)}

    @property
    def result(self) -> str:
        """The text."""
        return str(self)


class Rows(list[Any], Dumped):
    """A list of results, of a server that gives one for each row; ``result`` is the list too."""

    @property
    def result(self) -> list[Any]:
        """The list."""
        return self

    def model_dump(self) -> dict[str, Any]:
        """``{"result": the list}``."""
        return {"result": list(self)}


def nothing(answer: Any) -> None:
    """Of a call that gives nothing back."""


def forwarded(answer: Any) -> ModelOutput | Rows:
    """Of a pass: ``logps``, ``loss``, ...; a server without a model answers a list instead."""
    result = result_of(answer)
    return Rows(result) if isinstance(result, list) else ModelOutput(_mapping(result))


def metrics(answer: Any) -> MetricResults:
    """Of ``calculate_metric``."""
    return MetricResults(_mapping(result_of(answer)))


def mapping(answer: Any) -> Answer:
    """Of a call that gives named values."""
    result = answer.get("result", answer) if isinstance(answer, Mapping) else answer
    return Answer(_mapping(result))


def loss(answer: Any) -> Loss:
    """Of ``calculate_loss``."""
    return Loss(result_of(answer))


def text(answer: Any) -> Text:
    """Of ``get_train_configs``."""
    return Text(result_of(answer))


def grad_norm(answer: Any) -> GradNorm | Text:
    """Of ``clip_grad_norm``: the number, or the text where there is none yet (the window is still open)."""
    result = str(result_of(answer))
    try:
        return GradNorm(result)
    except ValueError:
        return Text(result)


def saved(answer: Any) -> SaveResponse:
    """Of ``save``."""
    fields = _mapping(answer)
    if not isinstance(fields.get("twinkle_path"), str):
        raise BadAnswer("save: the answer names no twinkle_path")
    return SaveResponse(fields["twinkle_path"], fields.get("checkpoint_dir"))


def samples(answer: Any) -> SampleResponses:
    """Of ``sample``: one response for each prompt."""
    return SampleResponses(_response(fields) for fields in _mapping(answer).get("samples", ()))


def anything(answer: Any) -> Any:
    """Of a call that nobody remembers: by what the answer looks like."""
    if not isinstance(answer, Mapping):
        return answer
    if "twinkle_path" in answer:
        return saved(answer)
    if "samples" in answer:
        return samples(answer)
    result = answer.get("result", answer)
    if isinstance(result, Mapping):
        return Answer(result)
    return Rows(result) if isinstance(result, list) else result


def result_of(answer: Any) -> Any:
    """What stands under ``result``."""
    fields = _mapping(answer)
    if "result" not in fields:
        raise BadAnswer("the answer has no result; is it a server of the Twinkle dialect?")
    return fields["result"]


def _response(fields: Mapping[str, Any]) -> SampleResponse:
    return SampleResponse(
        sequences=[_sequence(sequence) for sequence in fields["sequences"]],
        prompt_token_ids=fields.get("prompt_token_ids"),
        prompt_logprobs=fields.get("prompt_logprobs"),
        topk_prompt_logprobs=fields.get("topk_prompt_logprobs"),
    )


def _sequence(fields: Mapping[str, Any]) -> SampledSequence:
    return SampledSequence(
        stop_reason=fields["stop_reason"],
        tokens=list(fields["tokens"]),
        logprobs=fields.get("logprobs"),
        decoded=fields.get("decoded"),
        new_input_feature=fields.get("new_input_feature"),
    )


def _mapping(answer: Any) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping):
        raise BadAnswer(f"the answer is a {type(answer).__name__}, not an object; is it a server of this dialect?")
    return answer
