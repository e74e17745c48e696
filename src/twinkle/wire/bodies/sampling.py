"""Bodies of sampling sessions; the sample itself is in ``wire/sampling.py``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from twinkle.wire.bodies.base import Identifier, PathText, RequestBody, ResponseBody, SeqId


class CreateSamplingSessionRequest(RequestBody):
    """``POST create_sampling_session``: on a base model, on saved weights, or both when they agree."""

    session_id: Identifier
    sampling_session_seq_id: SeqId
    base_model: Identifier | None = None
    model_path: PathText | None = None

    @model_validator(mode="after")
    def _some_origin(self) -> Self:
        if self.base_model is None and self.model_path is None:
            raise ValueError("needs base_model or model_path")
        return self


class CreateSamplingSessionResponse(ResponseBody):
    """The sampling session's id."""

    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(RequestBody):
    """``POST join_sampling_session``, from a cloned client."""

    sampling_session_id: Identifier


class JoinSamplingSessionResponse(ResponseBody):
    """The clone's number; its sequence numbers start at a thousand million times it."""

    client_counter: int


class SamplerResponse(ResponseBody):
    """``GET samplers/{id}``."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
