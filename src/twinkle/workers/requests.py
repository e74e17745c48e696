"""Payload bytes into requests: what the API stored for each kind of operation."""

from __future__ import annotations

from pydantic import BaseModel

from twinkle.core.adapter import AdapterConfig, Grant
from twinkle.scheduler.token_stream import ListenedSample
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.training import (
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from twinkle.wire.sampling import check_prompt_and_scores
from twinkle.wire.training import ForwardBackwardBody, decode_data


class LoadRequest(BaseModel, frozen=True):
    """What a load needs to know, whether it makes an adapter or fills one, and who allowed it if that was a token.

    ``content`` is what another run's path meant at its acceptance; nothing when that was nothing to this tenant.
    """

    path: str
    optimizer: bool = False
    content: str | None = None
    grant: Grant | None = None


class BranchRequest(BaseModel, frozen=True):
    """Which past state a fork or a rewind takes up: that of ``source`` after operation ``at``."""

    source: str
    at: int


def read_branch(payload: bytes) -> BranchRequest:
    """The past state to take up."""
    return BranchRequest.model_validate_json(payload)


def read_create(payload: bytes) -> AdapterConfig:
    """The adapter to create, its seed made definite by the API."""
    return AdapterConfig.model_validate_json(payload)


def read_load(payload: bytes) -> LoadRequest:
    """The checkpoint to load."""
    return LoadRequest.model_validate_json(payload)


def read_pass(payload: bytes) -> ForwardBackwardBody:
    """A forward or forward_backward, its tensors dense. Raises ``InvalidInput`` for bad tensors."""
    return decode_data(payload)


def read_optim_step(payload: bytes) -> OptimStepRequest:
    """An optimizer step."""
    return parse_body(OptimStepRequest, payload)


def read_save(payload: bytes) -> SaveWeightsRequest:
    """A training checkpoint to write."""
    return parse_body(SaveWeightsRequest, payload)


def read_save_for_sampler(payload: bytes) -> SaveWeightsForSamplerRequest:
    """Sampler weights to write, named or ephemeral."""
    return parse_body(SaveWeightsForSamplerRequest, payload)


def read_save_external(payload: bytes) -> SaveWeightsExternalRequest:
    """Weights to write for download."""
    return parse_body(SaveWeightsExternalRequest, payload)


def read_sample(payload: bytes) -> ListenedSample:
    """A sample, its seed made definite by the API, and who listens to it."""
    request = parse_body(ListenedSample, payload)
    check_prompt_and_scores(request)
    return request
