"""The body of ``asample``: what to draw, from what prompt, and which scores to give with it.

Unlike a training operation a bad sample may be refused outright, so everything is judged here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import PictureLimits, PictureRules
from twinkle.wire.bodies.base import MAX_INT32, MAX_INT64, Identifier, RequestBody, SeqId, Text, parse_body
from twinkle.wire.patches import Grid, WirePatches, check_grid, read_patches
from twinkle.wire.pictures import SentPicture, WirePicture, read_base64
from twinkle.wire.tensors import Array, CellBudget, Csr, TensorJson, read_json_tensor

MAX_NUM_SAMPLES = 1024
MAX_TOPK = 1024
MAX_STOPS = 1024
MAX_CHUNKS = 10_000
# Cells a whole request may ask back in its scores: prompt positions times k, for each kind.
MAX_SCORE_CELLS = 1 << 24
NO_TARGET = -1

TEXT, IMAGE, IMAGE_PATCHES = "encoded_text", "image", "image_patches"
PICTURE_KINDS = (IMAGE, IMAGE_PATCHES)
_UNKNOWN = "is a chunk of kind {}; this server takes text and pictures"
_REFUSED = {
    "image_asset_pointer": "points to a picture, but this server reads nobody's files and opens no addresses;"
    " send the picture itself, in a chunk of type image",
}

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TopK = Annotated[int, Field(ge=0, le=MAX_TOPK)]
_StopText: TypeAlias = Annotated[str, Field(min_length=1)]
_StopForms: TypeAlias = (
    _StopText
    | Annotated[list[_StopText], Field(max_length=MAX_STOPS)]
    | Annotated[list[TokenId], Field(max_length=MAX_STOPS)]
)


def _stop(value: object) -> object:
    """Judges all forms at once: a union's own complaint would be about one form that was not meant."""
    stops = value if isinstance(value, list) else [value]
    if value is None or (isinstance(value, str) and value):
        return value
    all_texts = all(isinstance(stop, str) and stop for stop in stops)
    all_tokens = all(type(stop) is int and 0 <= stop <= MAX_INT32 for stop in stops)
    if not isinstance(value, list) or len(stops) > MAX_STOPS or not (all_texts or all_tokens):
        raise ValueError(f"must be a text, or a list of at most {MAX_STOPS} texts or token ids, none of them empty")
    return value


class PromptChunk(RequestBody):
    """One piece of a prompt: tokens, a picture's file in base64, or the patches that a client's processor made of one.

    Patches are float32 in base64, row by row, and ``grid_thw`` says how they lie.
    """

    type: Identifier = TEXT
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(default_factory=list)
    data: str | None = Field(default=None, repr=False)
    format: Identifier | None = None
    expected_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    grid_thw: Grid | None = None

    @model_validator(mode="after")
    def _of_its_fields(self) -> Self:
        # SDK 0.16 leaves the type out.
        if self.data is None or "type" in self.model_fields_set:
            return self
        return self.model_copy(update={"type": IMAGE})

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = write(self)
        return {name: value for name, value in written.items() if value is not None}

    def picture(self, field: str) -> SentPicture:
        """The picture that it is; raises ``InvalidInput`` where something of it is missing."""
        if self.data is None:
            raise InvalidInput(f"{field}.data", "is missing")
        if self.format is None:
            raise InvalidInput(f"{field}.format", "is missing")
        return SentPicture(read_base64(self.data, field=f"{field}.data"), self.format, self.expected_tokens)

    def counted(self, field: str, rules: PictureRules | None, limits: PictureLimits) -> PromptChunk:
        """The same picture with the number of its tokens; raises ``InvalidInput`` where it is none that is taken."""
        if self.type == IMAGE:
            num_tokens = self.picture(field).num_tokens(field, rules, limits)
        else:
            num_tokens = check_grid(self.grid_thw, field=field, rules=rules, limits=limits)
            read_patches(self.data, self.grid_thw, field=field)
        return self.model_copy(update={"tokens": [], "expected_tokens": num_tokens})

    def placed(self, start: int, field: str, rules: PictureRules | None) -> WirePicture | WirePatches:
        """The picture that it is, from the token ``start`` of a prompt on; raises as :meth:`counted` does."""
        if self.type == IMAGE:
            sent = self.picture(field)
            return WirePicture(start, sent.num_tokens(field, rules), sent.data)
        num_tokens = check_grid(self.grid_thw, field=field, rules=rules)
        assert self.grid_thw is not None, "a grid was checked"
        return WirePatches(start, num_tokens, read_patches(self.data, self.grid_thw, field=field), self.grid_thw)

    @property
    def length(self) -> int:
        """How many tokens it is; of a picture, once they are counted."""
        if self.type not in PICTURE_KINDS:
            return len(self.tokens)
        assert self.expected_tokens is not None, "a picture's tokens are counted before anybody asks"
        return self.expected_tokens


class Prompt(RequestBody):
    """The prompt, in pieces."""

    chunks: Annotated[list[PromptChunk], Field(fail_fast=True)] = Field(max_length=MAX_CHUNKS)


class SamplingParams(RequestBody):
    """How to draw. ``stop`` absent means at the end-of-text token; an empty list means nowhere."""

    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT32)
    seed: int | None = Field(default=None, ge=-MAX_INT64 - 1, le=2 * MAX_INT64 + 1)
    stop: Annotated[
        str | list[str] | list[int] | None, BeforeValidator(_stop, json_schema_input_type=_StopForms | None)
    ] = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1, le=MAX_INT32)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Twinkle's dialect has it; the Tinker SDK does not send it, and neither OpenAI's API."""

    @model_serializer(mode="wrap")
    def _without_penalty(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        # What is written without one stays, to the byte, what the SDK's own bodies have always been kept as.
        written: dict[str, object] = write(self)
        if self.repetition_penalty == 1:
            written.pop("repetition_penalty", None)
        return written

    @field_validator("top_k")
    @classmethod
    def _off_or_some(cls, top_k: int) -> int:
        if top_k == 0:
            raise ValueError("must be -1 (off) or at least 1")
        return top_k

    @property
    def stop_strings(self) -> list[str]:
        """The texts to stop after."""
        if isinstance(self.stop, str):
            return [self.stop]
        return [stop for stop in self.stop or () if isinstance(stop, str)]

    @property
    def stop_tokens(self) -> list[int]:
        """The token ids to stop after, besides the implicit one."""
        return [] if isinstance(self.stop, str) else [stop for stop in self.stop or () if isinstance(stop, int)]

    @property
    def stops_at_end_of_text(self) -> bool:
        """Whether the model's own end-of-text token stops the sample."""
        return self.stop is None


class SampleRequest(RequestBody):
    """``POST asample``."""

    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    num_samples: int = Field(default=1, ge=1, le=MAX_NUM_SAMPLES)
    sampling_session_id: Identifier | None = None
    seq_id: SeqId | None = None
    base_model: Identifier | None = None
    model_path: Text | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: TopK = 0
    topk_sample_logprobs: TopK = 0
    target_prompt_logprobs: TensorJson | None = None
    prompt_alt_tokens_k: TopK = 0
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    @property
    def has_pictures(self) -> bool:
        """Whether the prompt holds one."""
        return any(chunk.type in PICTURE_KINDS for chunk in self.prompt.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's length, pictures included."""
        return sum(chunk.length for chunk in self.prompt.chunks)

    def read_prompt(self, rules: PictureRules | None = None) -> tuple[list[int], list[WirePicture | WirePatches]]:
        """The prompt's tokens, its chunks joined, and its pictures, whose tokens stand among them.

        Raises:
            InvalidInput: The model takes no pictures, or makes other numbers of tokens of them.
        """
        tokens: list[int] = []
        pictures: list[WirePicture | WirePatches] = []
        for i, chunk in enumerate(self.prompt.chunks):
            if chunk.type not in PICTURE_KINDS:
                tokens += chunk.tokens
                continue
            picture = chunk.placed(len(tokens), f"prompt.chunks[{i}]", rules)
            assert rules is not None, "a picture was refused without rules"
            pictures.append(picture)
            tokens += [rules.token_id] * picture.num_tokens
        return tokens, pictures

    def targets(self) -> Array | Csr | None:
        """The tokens to score at each prompt position but the first: int64 (len(prompt) - 1, K), -1 for none."""
        if self.target_prompt_logprobs is None:
            return None
        return read_json_tensor(self.target_prompt_logprobs, field="target_prompt_logprobs")


def parse_sample(raw: bytes, *, max_num_samples: int = MAX_NUM_SAMPLES) -> SampleRequest:
    """Reads the body of ``asample``, or raises ``InvalidInput`` that names the field."""
    request = parse_body(SampleRequest, raw)
    if request.num_samples > max_num_samples:
        raise InvalidInput("num_samples", f"must be at most {max_num_samples}, not {request.num_samples}")
    if (request.sampling_session_id is None) != (request.seq_id is None):
        raise InvalidInput("seq_id", "sampling_session_id and seq_id belong together")
    if request.sampling_session_id is None and request.base_model is None and request.model_path is None:
        raise InvalidInput("sampling_session_id", "is missing")
    if not request.has_pictures:
        check_prompt_and_scores(request)
    return request


def count_prompt(request: SampleRequest, rules: PictureRules | None, limits: PictureLimits) -> SampleRequest:
    """The request with the number of tokens of each picture said, and with what :func:`parse_sample` left judged.

    Raises:
        InvalidInput: A picture is not taken, or the scores asked for do not fit the prompt.
    """
    limits.check_number("prompt", sum(chunk.type in PICTURE_KINDS for chunk in request.prompt.chunks))
    chunks = [
        chunk.counted(f"prompt.chunks[{i}]", rules, limits) if chunk.type in PICTURE_KINDS else chunk
        for i, chunk in enumerate(request.prompt.chunks)
    ]
    counted = request.model_copy(update={"prompt": Prompt(chunks=chunks)})
    check_prompt_and_scores(counted)
    return counted


def check_prompt_and_scores(request: SampleRequest) -> None:
    """Raises ``InvalidInput`` that names what of the prompt, or of the scores asked for it, cannot be."""
    for i, chunk in enumerate(request.prompt.chunks):
        if chunk.type not in (TEXT, *PICTURE_KINDS):
            raise InvalidInput(f"prompt.chunks[{i}]", _REFUSED.get(chunk.type, _UNKNOWN.format(chunk.type)))
    length = request.num_prompt_tokens
    if length == 0:
        raise InvalidInput("prompt", "has no tokens")
    _check_scores(request, length)


def _check_scores(request: SampleRequest, length: int) -> None:
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not request.prompt_logprobs:
        raise InvalidInput("prompt_logprobs_last_n", "needs prompt_logprobs")
    if last_n is not None and not 1 <= last_n <= length - 1:
        raise InvalidInput("prompt_logprobs_last_n", f"must lie between 1 and {length - 1}, the prompt less one")
    budget = CellBudget(MAX_SCORE_CELLS)
    budget.spend(length * request.topk_prompt_logprobs, "topk_prompt_logprobs")
    budget.spend(length * request.prompt_alt_tokens_k, "prompt_alt_tokens_k")
    targets = request.targets()
    if targets is None:
        return
    field = "target_prompt_logprobs"
    values = targets.values if isinstance(targets, Csr) else targets
    if values.dtype.kind != "i":
        raise InvalidInput(f"{field}.dtype", "must be int64: these are token ids")
    if len(targets.shape) != 2 or targets.shape[0] != length - 1:
        raise InvalidInput(f"{field}.shape", f"must be [{length - 1}, K], the prompt less one by the candidates")
    if values.size and (values.min() < NO_TARGET or values.max() > MAX_INT32):
        raise InvalidInput(field, "must hold token ids, or -1 where nothing is wanted")
    budget.spend(targets.shape[0] * targets.shape[1], field)
