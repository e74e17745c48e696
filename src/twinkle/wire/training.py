"""The body of ``forward_backward``.

The API needs only whose request it is (``parse_envelope``), also when the tensors are nonsense: the number is used up
either way, so a bad request becomes a failed operation. The worker reads the tensors (``decode_data``).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from twinkle.core.errors import InvalidInput
from twinkle.core.loss_graph import LossGraph
from twinkle.core.pictures import PictureLimits, PictureRules
from twinkle.wire import protobuf as pb
from twinkle.wire.meant_loss import WITHOUT_ADAPTER, read_loss
from twinkle.wire.patches import GRIDS, PATCHES, WirePatches, have_patches, place_patches, read_grids
from twinkle.wire.pictures import SentPicture, WirePicture
from twinkle.wire.scan import scan_fields
from twinkle.wire.tensors import (
    DEFAULT_MAX_CELLS,
    Array,
    CellBudget,
    Csr,
    densify,
    read_int32,
    read_tensor,
    write_tensor,
)

MAX_SEQ_ID = 2**31 - 1
MAX_MODEL_ID_LENGTH = 512
# Datums, chunks, tensors and spans together. The SDK sends at most 1024 datums a request.
MAX_PARTS = 200_000
_ALWAYS_FEW_PARTS_BYTES = 1 << 18

# The one loss that does without one of its inputs.
WEIGHTED_LOSS, WEIGHTS, _TARGETS = "cross_entropy", "weights", "target_tokens"


@dataclass(frozen=True)
class EnvelopeKey:
    """Which operation a body is, when nothing else of it could be read."""

    model_id: str
    seq_id: int


@dataclass(frozen=True, eq=False)
class ForwardBackwardEnvelope:
    """The address of a request, with its tensors still unread in ``message``."""

    model_id: str
    seq_id: int
    forward_only: bool
    message: pb.Message

    @property
    def has_pictures(self) -> bool:
        """Whether any datum holds one, as a file or in patches."""
        return any(
            have_patches(datum.loss_fn_inputs) or any(chunk.HasField("image") for chunk in datum.model_input)
            for datum in self.message.data
        )


@dataclass(frozen=True, eq=False)
class WireDatum:
    """One training example: ``tokens`` is int64 (N,), ``inputs`` the loss function's dense tensors by name.

    ``pictures`` lie among the tokens, each of which is there the model's own for pictures; ``patches`` instead of them
    are pictures that the client's processor has prepared.
    """

    tokens: Array
    inputs: dict[str, Array]
    pictures: tuple[WirePicture, ...] = ()
    patches: tuple[WirePatches, ...] = ()


@dataclass(frozen=True, eq=False)
class ForwardBackwardBody:
    """A ``forward_backward`` request, completely read; ``loss_graph`` is what its ``loss_id`` stands for, if known.

    ``loss_fn`` is the loss that is meant, by the name it has here (:mod:`twinkle.wire.meant_loss`).
    """

    model_id: str
    seq_id: int
    forward_only: bool
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    data: tuple[WireDatum, ...]
    loss_graph: LossGraph | None = None
    without_adapter: bool = False
    """Whether the base model alone computes it."""


def parse_envelope(raw: bytes) -> ForwardBackwardEnvelope:
    """Reads the address of a request; raises ``InvalidInput`` when even that is not there."""
    _refuse_too_many_parts(raw)
    message = pb.parse_message(pb.ForwardBackwardRequest, raw)
    if not is_model_id(message.model_id):
        raise InvalidInput("model_id", f"must be text of 1 to {MAX_MODEL_ID_LENGTH} characters")
    if message.seq_id < 1:
        raise InvalidInput("seq_id", f"must be 1 or more, not {message.seq_id}")
    return ForwardBackwardEnvelope(message.model_id, message.seq_id, message.forward_only, message)


def peek_envelope(prefix: bytes) -> EnvelopeKey | None:
    """Reads the address from the first few KB of a body that is too large to read as a whole."""
    model_id, seq_id = "", 0
    for field in scan_fields(prefix):
        if field.number == 1 and field.is_bytes:
            try:
                model_id = str(prefix[field.start : field.end], "utf-8")
            except UnicodeDecodeError:
                return None
        elif field.number == 2 and not field.is_bytes:
            seq_id = field.value
        if is_model_id(model_id) and 1 <= seq_id <= MAX_SEQ_ID:
            return EnvelopeKey(model_id, seq_id)
    return None


def is_model_id(text: str) -> bool:
    """Whether an adapter may be called so."""
    # PostgreSQL cannot look for NUL.
    return 1 <= len(text) <= MAX_MODEL_ID_LENGTH and "\x00" not in text


def canonical_digest(message: pb.Message) -> str:
    """Fingerprints a message; a resend has the same one, in whatever order its maps were written."""
    return hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()


def judge_pictures(envelope: ForwardBackwardEnvelope, rules: PictureRules | None, limits: PictureLimits) -> int:
    """How many tokens files of pictures are in a request; raises ``InvalidInput`` for a picture that cannot be."""
    budget = CellBudget()
    for i, datum in enumerate(envelope.message.data):
        field = f"data[{i}].model_input"
        sent = [(j, chunk.image) for j, chunk in enumerate(datum.model_input) if chunk.HasField("image")]
        limits.check_number(field, len(sent))
        if have_patches(datum.loss_fn_inputs):
            _judge_patches(datum, f"data[{i}].loss_fn_inputs", rules, limits)
        for j, image in sent:
            place = f"{field}[{j}]"
            budget.spend(_sent_picture(image, place).num_tokens(place, rules, limits), place)
    return DEFAULT_MAX_CELLS - budget.cells


def _judge_patches(datum: pb.Message, field: str, rules: PictureRules | None, limits: PictureLimits) -> None:
    grids = None
    if GRIDS in datum.loss_fn_inputs:
        place = f"{field}.{GRIDS}"
        # Sparse ones expand to no more than may be.
        budget = CellBudget(3 * limits.max_pictures)
        grids = densify(read_tensor(datum.loss_fn_inputs[GRIDS], field=place), field=place, budget=budget)
    read_grids(grids, prefix=f"{field}.", rules=rules, limits=limits)


def decode_data(
    body: bytes | ForwardBackwardEnvelope,
    *,
    max_cells: int = DEFAULT_MAX_CELLS,
    picture_rules: PictureRules | None = None,
) -> ForwardBackwardBody:
    """Reads a request completely; sparse tensors come out dense, at most ``max_cells`` cells of them in all.

    ``picture_rules`` are those of the model, if it takes pictures. Limits were judged when the request came.
    """
    envelope = parse_envelope(body) if isinstance(body, bytes) else body
    message = envelope.message
    if not message.loss_fn:
        raise InvalidInput("loss_fn", "is missing")
    if not message.data:
        raise InvalidInput("data", "has no datums")
    loss = read_loss(message)
    budget = CellBudget(max_cells)
    may_lack_weights = loss.name == WEIGHTED_LOSS
    data = tuple(
        _read_datum(
            datum, field=f"data[{i}]", budget=budget, may_lack_weights=may_lack_weights, picture_rules=picture_rules
        )
        for i, datum in enumerate(message.data)
    )
    return ForwardBackwardBody(
        model_id=envelope.model_id,
        seq_id=envelope.seq_id,
        forward_only=envelope.forward_only,
        loss_fn=loss.name,
        loss_fn_config=loss.config,
        data=data,
        without_adapter=loss.without_adapter,
    )


def encode_forward_backward(body: ForwardBackwardBody) -> bytes:
    """Writes a request as the SDK would, with dense tensors; for our own client and tests."""
    return cast(bytes, write_forward_backward(body).SerializeToString())


def write_forward_backward(body: ForwardBackwardBody) -> pb.Message:
    """Writes a request as a message whose ``seq_id`` can still be changed; it shares no memory with the arrays."""
    message = pb.ForwardBackwardRequest(
        model_id=body.model_id, seq_id=body.seq_id, loss_fn=body.loss_fn, forward_only=body.forward_only
    )
    without_adapter = {WITHOUT_ADAPTER: 1.0} if body.without_adapter else {}
    for key, value in (body.loss_fn_config | without_adapter).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = value
            message.loss_fn_config_v2[key].number = value
    for datum in body.data:
        written = message.data.add()
        _write_tokens(written, datum)
        for name, array in (datum.inputs | _patch_inputs(datum.patches)).items():
            written.loss_fn_inputs[name].CopyFrom(write_tensor(array))
    return message


def _patch_inputs(patches: Sequence[WirePatches]) -> dict[str, Array]:
    if not patches:
        return {}
    grids = np.array([picture.grid_thw for picture in patches], dtype=np.int64)
    return {PATCHES: np.concatenate([picture.pixel_values for picture in patches]), GRIDS: grids}


def _write_tokens(written: pb.Message, datum: WireDatum) -> None:
    position = 0
    for picture in (*datum.pictures, None):
        end = datum.tokens.size if picture is None else picture.start
        if position < end or not datum.pictures:
            written.model_input.add().encoded_text.tokens = datum.tokens[position:end].astype("<i4").tobytes()
        if picture is not None:
            image = written.model_input.add().image
            image.data, image.format = picture.data, picture.format
            image.expected_tokens = picture.num_tokens
            position = picture.start + picture.num_tokens


def _refuse_too_many_parts(raw: bytes) -> None:
    if len(raw) <= _ALWAYS_FEW_PARTS_BYTES:
        return
    parts = 0
    for field in scan_fields(raw):
        inner = scan_fields(raw, field.start, field.end) if field.number == 3 and field.is_bytes else ()
        parts += 1 + sum(1 for _ in itertools.islice(inner, MAX_PARTS))
        if parts > MAX_PARTS:
            raise InvalidInput(
                "data", f"has more than {MAX_PARTS} datums, chunks, tensors and spans; send fewer datums"
            )


def _read_datum(
    datum: pb.Message,
    *,
    field: str,
    budget: CellBudget,
    may_lack_weights: bool,
    picture_rules: PictureRules | None,
) -> WireDatum:
    sent = {
        name: read_tensor(tensor, field=f"{field}.loss_fn_inputs.{name}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    if may_lack_weights and WEIGHTS not in sent and _TARGETS in sent:
        sent[WEIGHTS] = _ones_like(sent[_TARGETS])
    inputs = {
        name: densify(tensor, field=f"{field}.loss_fn_inputs.{name}", budget=budget) for name, tensor in sent.items()
    }
    tokens, pictures = _read_tokens(
        datum.model_input, field=f"{field}.model_input", picture_rules=picture_rules, budget=budget
    )
    if pictures and have_patches(inputs):
        raise InvalidInput(
            f"{field}.loss_fn_inputs.{PATCHES}", "comes beside files of pictures; send all as files, or all as patches"
        )
    patches = place_patches(
        tokens, inputs, prefix=f"{field}.loss_fn_inputs.", tokens_field=f"{field}.model_input", rules=picture_rules
    )
    return WireDatum(tokens, inputs, pictures, patches)


def _ones_like(targets: Array | Csr) -> Array | Csr:
    """A weight of 1 for every target that was sent; what a sparse tensor does not list is none."""
    if isinstance(targets, Csr):
        return replace(targets, values=np.ones(targets.values.shape, dtype=np.float32))
    return np.ones(targets.shape, dtype=np.float32)


def _read_tokens(
    chunks: Sequence[pb.Message], *, field: str, picture_rules: PictureRules | None, budget: CellBudget
) -> tuple[Array, tuple[WirePicture, ...]]:
    pieces: list[Array] = []
    pictures: list[WirePicture] = []
    position = 0
    for i, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind is None:
            raise InvalidInput(f"{field}[{i}]", "is an empty chunk")
        if kind == "encoded_text":
            pieces.append(read_int32(chunk.encoded_text.tokens, field=f"{field}[{i}].tokens"))
        elif kind == "image":
            sent = _sent_picture(chunk.image, f"{field}[{i}]")
            num_tokens = sent.num_tokens(f"{field}[{i}]", picture_rules)
            # A head of a few bytes can stand for thousands of tokens.
            budget.spend(num_tokens, f"{field}[{i}]")
            assert picture_rules is not None, "a picture was refused without rules"
            pictures.append(WirePicture(position, num_tokens, sent.data))
            pieces.append(np.full(num_tokens, picture_rules.token_id, dtype=np.int64))
        else:
            raise InvalidInput(f"{field}[{i}]", f"is a chunk of kind {kind}; this server takes text and pictures")
        position += pieces[-1].size
    tokens = np.concatenate(pieces, dtype=np.int64) if pieces else np.empty(0, dtype=np.int64)
    if tokens.size == 0:
        raise InvalidInput(field, "has no tokens")
    if tokens.min() < 0:
        raise InvalidInput(field, "has a negative token id")
    return tokens, tuple(pictures)


def _sent_picture(image: pb.Message, field: str) -> SentPicture:
    if image.HasField("override_dimensions"):
        raise InvalidInput(f"{field}.override_dimensions", "is not offered here; send the picture in the size you mean")
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return SentPicture(image.data, image.format, expected)
