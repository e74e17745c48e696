"""Bodies of the training operations that travel as JSON.

An operation's number is used up even when its body is bad, so a route reads the address with ``peek_operation`` then
and lets that operation fail, instead of answering 4xx and leaving a hole in the order.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from twinkle.wire.bodies.base import (
    MAX_INT32,
    Identifier,
    Metadata,
    NanFromNull,
    OperationSeqId,
    PathText,
    RequestBody,
    ResponseBody,
    SeqId,
    Text,
    TtlSeconds,
    is_storable,
    read_keys,
)
from twinkle.wire.training import EnvelopeKey

MAX_RECIPIENTS = 100


class LoraConfig(RequestBody):
    """Which layers get adapters, and how wide; ``alpha`` is not on the wire."""

    rank: int = Field(default=32, ge=0, le=MAX_INT32, description="0: all of the model's weights are trained")
    seed: SeqId | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(RequestBody):
    """The optimizer family of a model, chosen when it is made."""

    type: Identifier = "adamw"
    version: int | None = Field(default=None, ge=0, le=MAX_INT32)

    @property
    def is_supported(self) -> bool:
        """Whether this server can train with it; ``dimuon`` is understood, but not offered."""
        return self.type == "adamw"


class CreateModelRequest(RequestBody):
    """``POST create_model``."""

    session_id: Identifier
    model_seq_id: SeqId
    base_model: Identifier
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = Field(
        default=LoraConfig(), description="null, or rank 0: all of the model's weights are trained"
    )
    optimizer_config: OptimizerConfig = OptimizerConfig()
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(ResponseBody):
    """Result of ``create_model``."""

    model_id: str
    type: Literal["create_model"] = "create_model"


class UnloadModelRequest(RequestBody):
    """``POST unload_model``; the number of the operation is the journal's."""

    model_id: Identifier


class UnloadModelResponse(ResponseBody):
    """Result of ``unload_model``."""

    model_id: str
    type: Literal["unload_model"] = "unload_model"


class GetInfoRequest(RequestBody):
    """``POST get_info``; answered at once."""

    model_id: Identifier


class ModelData(ResponseBody):
    """The base model; the SDK finds its tokenizer by these names."""

    model_name: str
    arch: str | None = None
    tokenizer_id: str | None = None


class OptimizerConfigInfo(ResponseBody):
    """The optimizer family, as the SDK reads it back."""

    type: str = "adamw"
    version: int | None = None


class GetInfoResponse(ResponseBody):
    """Answer to ``get_info``."""

    model_data: ModelData
    model_id: str
    is_lora: bool = True
    lora_rank: int | None = None
    model_name: str | None = None
    optimizer_config: OptimizerConfigInfo = OptimizerConfigInfo()
    type: Literal["get_info"] = "get_info"


class AdamParams(RequestBody):
    """Settings of one AdamW step, with the SDK's defaults. Not judged here: NaN and negatives come through."""

    learning_rate: NanFromNull = 1e-4
    beta1: NanFromNull = 0.9
    beta2: NanFromNull = 0.95
    eps: NanFromNull = 1e-12
    weight_decay: NanFromNull = 0.0
    grad_clip_norm: NanFromNull = 0.0


class OptimizerParams(RequestBody):
    """Settings of one step of another optimizer family."""

    type: Identifier
    learning_rate: NanFromNull
    grad_clip_norm: NanFromNull = 0.0
    beta1: NanFromNull = 0.9


class OptimStepRequest(RequestBody):
    """``POST optim_step``; exactly one of the two kinds of settings."""

    model_id: Identifier
    seq_id: OperationSeqId
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerParams | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.adam_params is None) == (self.optimizer_params is None):
            raise ValueError("needs either adam_params or optimizer_params")
        return self


class OptimStepResponse(ResponseBody):
    """Result of ``optim_step``."""

    metrics: dict[str, float] | None = None


class SaveWeightsRequest(RequestBody):
    """``POST save_weights``: a training checkpoint called ``path``."""

    model_id: Identifier
    seq_id: OperationSeqId
    path: Text | None = None
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(ResponseBody):
    """Result of ``save_weights``."""

    path: str
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSamplerRequest(RequestBody):
    """``POST save_weights_for_sampler``: named by ``path``, or ephemeral for a sampling session."""

    model_id: Identifier
    seq_id: OperationSeqId
    path: Text | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("needs either path or sampling_session_seq_id")
        return self


class SaveWeightsForSamplerResponse(ResponseBody):
    """Result of ``save_weights_for_sampler``: a path when named, a sampling session when ephemeral."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsExternalRequest(RequestBody):
    """``POST save_weights_external``: files for download."""

    model_id: Identifier
    seq_id: OperationSeqId
    path: Text
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: list[Text] | None = Field(default=None, max_length=MAX_RECIPIENTS)
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(ResponseBody):
    """Result of ``save_weights_external``."""

    path: str
    size_bytes: int | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadWeightsRequest(RequestBody):
    """``POST load_weights``: into a model, or making one; the two differ in their address."""

    path: PathText
    optimizer: bool = False
    model_id: Identifier | None = None
    seq_id: OperationSeqId | None = None
    session_id: Identifier | None = None
    model_seq_id: SeqId | None = None
    base_model: Identifier | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Text | None = Field(default=None, repr=False)
    type: Literal["load_weights"] = "load_weights"

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        into_model = (self.model_id is not None, self.seq_id is not None)
        new_model = (self.session_id is not None, self.model_seq_id is not None)
        if sorted([into_model, new_model]) != [(False, False), (True, True)]:
            raise ValueError("needs either model_id and seq_id, or session_id and model_seq_id")
        return self

    @property
    def creates_model(self) -> bool:
        """Whether the checkpoint becomes a new model."""
        return self.session_id is not None


class LoadWeightsResponse(ResponseBody):
    """Result of ``load_weights``."""

    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] = "load_weights"


def peek_operation(raw: bytes) -> EnvelopeKey | None:
    """Reads only the address of a JSON operation, for a body that ``parse_body`` refused."""
    keys = read_keys(raw)
    model_id, seq_id = keys.get("model_id"), keys.get("seq_id")
    if not isinstance(model_id, str) or not 1 <= len(model_id) <= 512 or not is_storable(model_id):
        return None
    if not isinstance(seq_id, int) or isinstance(seq_id, bool) or not 1 <= seq_id <= MAX_INT32:
        return None
    return EnvelopeKey(model_id, seq_id)
