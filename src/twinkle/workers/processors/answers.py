"""Answers as JSON: numbers of arrays and tensors as lists, bytes in base64, and nothing that is too large."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import PIL.Image
import torch

from twinkle.core.errors import TooLarge
from twinkle.core.processors import MAX_ANSWER_BYTES


def answer_of(body: Mapping[str, Any]) -> bytes:
    """The body of an answer.

    Raises:
        TooLarge: It has more bytes than one may have.
    """
    data = orjson.dumps(body, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    if len(data) > MAX_ANSWER_BYTES:
        raise TooLarge(
            f"the answer has {len(data)} bytes, and {MAX_ANSWER_BYTES} may be; take smaller batches, or drop columns"
        )
    return data


def _plain(value: Any) -> Any:
    """What JSON has no word for."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        number = value.item()
        return None if isinstance(number, float) and not math.isfinite(number) else number
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, PIL.Image.Image):
        file = io.BytesIO()
        value.save(file, format="PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(type(value).__name__)
