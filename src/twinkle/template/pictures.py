"""Pictures as a model gets them: patches and how many tokens stand for each."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps
from transformers import AutoConfig

from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import expand_places
from twinkle.data_format.row_error import RowError
from twinkle.hub.image_processor import KIMI, load_image_processor
from twinkle.hub.trust import naming_code
from twinkle.model.picture_files import decoded
from twinkle.module.mrope import PictureSpan, mrope_positions

FILE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
GEMMA = "gemma4"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PreparedPictures:
    """The pictures of a row: what the model gets of them, and how many tokens stand for each."""

    media: Mapping[str, Array]
    lengths: Sequence[int]
    sizes: Sequence[tuple[int, int]] = ()
    """In tokens, rows and columns, where positions spread over them."""


class PicturePreparer(Protocol):
    """What prepares pictures for one model."""

    token_id: int
    """Stands in a text for a picture, and in a row for each token of one."""
    borders: tuple[int, ...]
    """Tokens before and after those of a picture that the chat template does not write; none, or two."""

    def prepare(self, images: Sequence[PIL.Image.Image]) -> PreparedPictures:
        """Patches and token counts."""
        ...


class GridPictures:
    """As Qwen2-VL and all its kin and Kimi want them: patches one after the other, a grid for each picture."""

    borders: tuple[int, ...] = ()

    def __init__(self, config: Any, processor: Any) -> None:
        self.token_id: int = config.image_token_id
        self._processor = processor
        self._one_axis = config.model_type == KIMI

    def prepare(self, images: Sequence[PIL.Image.Image]) -> PreparedPictures:
        """See :class:`PicturePreparer`."""
        made = self._processor(images=list(images), return_tensors="np")
        merged = self._processor.merge_size
        sizes = [(rows // merged, columns // merged) for _, rows, columns in made["image_grid_thw"].tolist()]
        return PreparedPictures(
            media={"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]},
            lengths=[rows * columns for rows, columns in sizes],
            sizes=() if self._one_axis else sizes,
        )


class GemmaPictures:
    """As Gemma 4 wants them: as many patches of each as a picture may have, and where each of them lies."""

    def __init__(self, config: Any, processor: Any) -> None:
        self.token_id: int = config.image_token_id
        self.borders: tuple[int, ...] = (config.boi_token_id, config.eoi_token_id)
        self._processor = processor

    def prepare(self, images: Sequence[PIL.Image.Image]) -> PreparedPictures:
        """See :class:`PicturePreparer`."""
        made = self._processor(images=[image.convert("RGB") for image in images], return_tensors="np")
        return PreparedPictures(
            media={name: made[name] for name in ("pixel_values", "image_position_ids")},
            lengths=[int(length) for length in np.ravel(made["num_soft_tokens_per_image"])],
        )


def picture_preparer(model_path: str) -> PicturePreparer | None:
    """What prepares pictures for a model; None for a model of text alone.

    Raises:
        InvalidInput: The model takes pictures of a kind that is not known here, or nothing beside it says how.
    """
    with naming_code(model_path):
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    if getattr(config, "vision_config", None) is None or getattr(config, "image_token_id", None) is None:
        return None
    if config.model_type == GEMMA:
        # Nobody needs it for other models, nor for text.
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil  # noqa: PLC0415

        return GemmaPictures(config, Gemma4ImageProcessorPil.from_pretrained(model_path))
    if not config.model_type.startswith("qwen") and config.model_type != KIMI:
        raise InvalidInput("model_id", f"is a {config.model_type}, whose pictures are not known; send text alone")
    processor = load_image_processor(model_path)
    if processor is None:
        raise InvalidInput("model_id", f"{model_path} has no preprocessor_config.json, so only text can be encoded")
    return GridPictures(config, processor)


def put_in_place(
    tokens: npt.NDArray[np.int64], is_trained: npt.NDArray[np.bool_], preparer: PicturePreparer, made: PreparedPictures
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], dict[str, Array], npt.NDArray[np.int64] | None]:
    """The tokens with as many for each picture as it needs, which of them train, the media and the positions.

    Raises:
        RowError: The chat template has left another number of places than there are pictures.
    """
    num_places = int((tokens == preparer.token_id).sum())
    if num_places != len(made.lengths):
        raise RowError(
            "images",
            f"are {len(made.lengths)}, but the text has {num_places} places for them: the chat template takes no"
            " pictures there, or a text holds the token that stands for one",
        )
    border = 1 if preparer.borders else 0
    lengths = [length + 2 * border for length in made.lengths]
    filled, starts = expand_places(tokens.tolist(), preparer.token_id, lengths)
    expanded = np.asarray(filled, dtype=np.int64)
    is_picture = np.zeros(len(expanded), dtype=bool)
    for start, length in zip(starts, lengths, strict=True):
        is_picture[start : start + length] = True
        if preparer.borders:
            expanded[start], expanded[start + length - 1] = preparer.borders
    trains = np.zeros(len(expanded), dtype=bool)
    trains[~is_picture] = is_trained[tokens != preparer.token_id]
    media = {**made.media, "mm_token_type_ids": (expanded == preparer.token_id).astype(np.int64)}
    if not made.sizes:
        return expanded, trains, media, None
    spans = [PictureSpan(start, rows, columns) for start, (rows, columns) in zip(starts, made.sizes, strict=True)]
    return expanded, trains, media, mrope_positions(len(expanded), spans)[0]


def read_picture(field: str, value: Any) -> PIL.Image.Image:
    """The picture that a data set holds: a picture, a file's path or bytes, a data URL, an array of pixels.

    Raises:
        RowError: It is none of these, or cannot be decoded; names the field. Addresses are not fetched.
    """
    if isinstance(value, PIL.Image.Image):
        return PIL.ImageOps.exif_transpose(value)
    if isinstance(value, Mapping):
        inner = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
        if inner is None:
            raise RowError(field, f"has {', '.join(value) or 'nothing'}; send bytes or a path")
        return read_picture(field, inner)
    if isinstance(value, np.ndarray):
        return PIL.Image.fromarray(value)
    data = value if isinstance(value, bytes) else _bytes_of(field, value)
    try:
        return decoded(data, formats=FILE_FORMATS)
    except InvalidInput as error:
        raise RowError(field, str(error).partition(": ")[2]) from error


def _bytes_of(field: str, value: object) -> bytes:
    if not isinstance(value, (str, Path)):
        raise RowError(field, f"is a {type(value).__name__}; send a picture, a path, bytes or a data URL")
    text = str(value)
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise RowError(field, f"is no data URL in base64: {error}") from error
    if text.startswith(("http://", "https://")):
        raise RowError(field, "is an address, and nothing is fetched while encoding; download it and send its path")
    try:
        return Path(text.removeprefix("file://")).expanduser().read_bytes()
    except OSError as error:
        raise RowError(field, f"cannot be read: {error.strerror}: {text}") from error
