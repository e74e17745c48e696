"""Pictures among the tokens of packed sequences: what a model makes of each, and where it goes in a pass.

What a frozen vision tower makes of a picture never changes, so it is computed once and kept, as long as there is room.
But whoever finds a picture computed already learns that somebody has sent it: what is kept serves its own group alone.

Shapes: T packed tokens, N tokens of a sequence, P tokens of pictures, H hidden size; 3 is moment, row and column.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import PictureRules
from twinkle.hub.image_processor import patch_shape
from twinkle.infra.sending import send
from twinkle.module.mrope import NUM_AXES, PictureSpan, Positions, mrope_positions


@dataclass(frozen=True, eq=False)
class Patches:
    """A picture as an image processor leaves it: ``pixel_values`` [patches, ...] and its grid of patches."""

    pixel_values: np.ndarray
    grid_thw: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture in a sequence: tokens ``start : start + num_tokens`` stand for it.

    ``content`` is a file's bytes, or what was made of one; what is computed of it is shared within ``group`` alone.
    """

    start: int
    num_tokens: int
    content: bytes | Patches
    group: str = ""

    @property
    def end(self) -> int:
        """The position after it."""
        return self.start + self.num_tokens

    @cached_property
    def digest(self) -> bytes:
        """Of the content."""
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).digest()
        hashed = hashlib.sha256(repr((self.content.grid_thw, self.content.pixel_values.dtype)).encode())
        hashed.update(np.ascontiguousarray(self.content.pixel_values).tobytes())
        return hashed.digest()


def check_pictures(field: str, tokens: np.ndarray, pictures: Sequence[Picture], rules: PictureRules | None) -> None:
    """Raise ``InvalidInput`` unless the tokens that stand for pictures are exactly where pictures are."""
    if rules is None:
        if pictures:
            raise InvalidInput(field, "holds a picture, but this model takes text alone")
        return
    expected = np.zeros(tokens.shape, dtype=bool)
    for picture in pictures:
        expected[picture.start : picture.end] = True
    for other in rules.other_token_ids:
        if (tokens == other).any():
            raise InvalidInput(field, f"holds token {other}, which stands for a film; only pictures are taken")
    found = tokens == rules.token_id
    if not np.array_equal(found, expected):
        raise InvalidInput(
            field,
            f"holds {int(found.sum())} tokens {rules.token_id} that stand for pictures, but {len(pictures)} pictures of"
            f" {int(expected.sum())} tokens at other places or of another number; send pictures as this model's"
            " processor counts them",
        )


@dataclass(frozen=True, eq=False)
class PictureFeatures:
    """What the tower makes of a picture of ``rows x columns`` tokens: their embeddings [P, H], and what is added to
    the hidden states after each of the first layers (deepstack, arXiv 2406.04334), where a model does so.
    """

    rows: int
    columns: int
    embeddings: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Memory it holds."""
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deepstack))


@dataclass(frozen=True, eq=False)
class PackedPictures:
    """Pictures in a packed row: ``rows`` [P] are those of their tokens, all else is in the order of these."""

    rows: torch.Tensor
    embeddings: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]

    def fill(self, embeddings_TH: torch.Tensor) -> torch.Tensor:
        """The embeddings with those of the pictures in their places."""
        return embeddings_TH.index_copy(0, self.rows, self.embeddings)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the decoder is called with for what it adds after its first layers (``module.deepstack``)."""
        if not self.deepstack:
            return {}
        return {"visual_pos_masks": self.rows, "deepstack_visual_embeds": list(self.deepstack)}


class PictureLayout:
    """Where the pictures of one sequence lie, and at which positions its tokens are, also beyond its end.

    With ``one_axis`` these are the same as without pictures.
    """

    def __init__(
        self,
        num_tokens: int,
        pictures: Sequence[Picture],
        features: Sequence[PictureFeatures],
        *,
        one_axis: bool = False,
    ) -> None:
        self.one_axis = one_axis
        self._num_tokens = num_tokens
        self._placed = list(zip(pictures, features, strict=True))
        spans = [PictureSpan(picture.start, made.rows, made.columns) for picture, made in self._placed]
        self._positions_3N, self._next_position = mrope_positions(num_tokens, spans)

    def positions(self, start: int, end: int) -> Positions:
        """The positions [3, N] of some tokens."""
        if start < self._num_tokens:
            return self._positions_3N[:, start:end]
        first = self._next_position + start - self._num_tokens
        return np.broadcast_to(np.arange(first, first + end - start), (NUM_AXES, end - start))

    def pieces(self, start: int, end: int) -> list[tuple[int, PictureFeatures, int, int]]:
        """For each picture within ``start:end``: its first token there, and which of its features these are."""
        found: list[tuple[int, PictureFeatures, int, int]] = []
        for picture, features in self._placed:
            first, last = max(picture.start, start), min(picture.end, end)
            if first < last:
                found.append((first - start, features, first - picture.start, last - picture.start))
        return found


@dataclass(frozen=True, eq=False)
class TokenRange:
    """Tokens ``start:end`` of a sequence, side by side with others in a pass."""

    start: int
    end: int
    layout: PictureLayout | None = None


def pack(ranges: Sequence[TokenRange], device: torch.device) -> tuple[torch.Tensor, PackedPictures | None]:
    """The positions of a packed row, [T] or with pictures [3, T], and the pictures in it."""
    positions = send(packed_positions(ranges), torch.int64, device)
    rows: list[np.ndarray] = []
    pieces: list[tuple[PictureFeatures, int, int]] = []
    row = 0
    for span in ranges:
        for at, features, first, last in () if span.layout is None else span.layout.pieces(span.start, span.end):
            rows.append(np.arange(row + at, row + at + last - first))
            pieces.append((features, first, last))
        row += span.end - span.start
    if not pieces:
        return positions, None
    num_deepstack = len(pieces[0][0].deepstack)
    packed = PackedPictures(
        send(np.concatenate(rows), torch.int64, device),
        torch.cat([features.embeddings[first:last] for features, first, last in pieces]),
        tuple(
            torch.cat([features.deepstack[index][first:last] for features, first, last in pieces])
            for index in range(num_deepstack)
        ),
    )
    return positions, packed


def packed_positions(ranges: Sequence[TokenRange]) -> Positions:
    """The positions of a packed row, [T] or with pictures [3, T]."""
    plain = [np.arange(span.start, span.end) for span in ranges]
    if all(span.layout is None or span.layout.one_axis for span in ranges):
        return np.concatenate(plain)
    spread = [
        np.broadcast_to(of_text, (NUM_AXES, len(of_text)))
        if span.layout is None
        else span.layout.positions(span.start, span.end)
        for span, of_text in zip(ranges, plain, strict=True)
    ]
    return np.concatenate(spread, axis=1)


class PictureEncoder:
    """A model's frozen vision tower, and within ``max_bytes`` what it has made of pictures.

    Each picture goes through the tower alone, so what comes out depends on nothing but the picture.

    Args:
        model: The whole model, as transformers has it.
        processor: Its image processor.
        rules: How the model counts.
        max_bytes: For features that are kept, those not wanted for the longest time leaving first.
    """

    def __init__(self, model: Any, processor: Any, rules: PictureRules, *, max_bytes: int) -> None:
        self._model = model.base_model
        self._tower = self._model.get_encoder(modality="image")
        self._patch_shape = patch_shape(model.config, processor)
        self._processor = processor
        self.rules = rules
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[tuple[str, bytes], PictureFeatures] = OrderedDict()
        self.num_computed = 0

    def layout(self, num_tokens: int, pictures: Sequence[Picture]) -> PictureLayout | None:
        """The layout of a sequence; None for text alone.

        Raises:
            InvalidInput: A picture cannot be decoded, or is not of as many tokens as stand for it.
        """
        if not pictures:
            return None
        features = [self.features(picture) for picture in pictures]
        return PictureLayout(num_tokens, pictures, features, one_axis=self.rules.one_axis)

    def features(self, picture: Picture) -> PictureFeatures:
        """What the tower makes of a picture; raises as :meth:`layout` does."""
        key = (picture.group, picture.digest)
        known = self._known.get(key)
        if known is None:
            known = self._compute(self._patches(picture.content))
            self._keep(key, known)
        else:
            self._known.move_to_end(key)
        if len(known.embeddings) != picture.num_tokens:
            raise InvalidInput(
                "picture", f"is of {len(known.embeddings)} tokens here, but {picture.num_tokens} stand for it"
            )
        return known

    @property
    def size_bytes(self) -> int:
        """What is kept of the device's memory."""
        return self._num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Forget so many bytes, what was not wanted for the longest time first."""
        self._shrink(max(0, self._num_bytes - num_bytes))

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._num_bytes = 0

    def _patches(self, content: bytes | Patches) -> Patches:
        if isinstance(content, Patches):
            given, taken = content.pixel_values.shape[1:], math.prod(self._patch_shape)
            if math.prod(given) != taken:
                raise InvalidInput("pixel_values", f"has {given} values for a patch, this model's has {taken}")
            return content
        # It imports Pillow, which nobody needs who serves text alone.
        from twinkle.model.picture_files import decoded  # noqa: PLC0415

        with decoded(content) as image:
            made = self._processor(images=[image], return_tensors="np")
        time, rows, columns = made["image_grid_thw"][0].tolist()
        return Patches(made["pixel_values"], (time, rows, columns))

    @torch.no_grad()
    def _compute(self, patches: Patches) -> PictureFeatures:
        weight = next(self._tower.parameters())
        device = weight.device
        made = self._model.get_image_features(
            torch.as_tensor(patches.pixel_values).reshape(-1, *self._patch_shape).to(device, weight.dtype),
            torch.tensor([patches.grid_thw], device=device),
            return_dict=True,
        )
        self.num_computed += 1
        _, rows, columns = patches.grid_thw
        (embeddings_PH,) = made.pooler_output
        merged = self.rules.merge_size
        deepstack = made.get("deepstack_features") or ()
        return PictureFeatures(
            rows // merged, columns // merged, embeddings_PH, tuple(of_layer[0] for of_layer in deepstack)
        )

    def _keep(self, key: tuple[str, bytes], features: PictureFeatures) -> None:
        self._known[key] = features
        self._num_bytes += features.size_bytes
        self._shrink(self._max_bytes)

    def _shrink(self, num_bytes: int) -> None:
        while self._num_bytes > num_bytes:
            _, oldest = self._known.popitem(last=False)
            self._num_bytes -= oldest.size_bytes
