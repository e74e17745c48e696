"""Data sets with pictures."""

from __future__ import annotations

import re

from twinkle.data_format.columns import Row
from twinkle.data_format.row_error import RowError
from twinkle.preprocessor.base import Preprocessor, conversation, text_of

CLEVR_SYSTEM = (
    "Look at the picture and think about the question first, then answer it. Put your thoughts into <think> </think>"
    " and the answer alone into <answer> </answer>."
)
IMAGE_MARK = "<image>"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class CLEVRProcessor(Preprocessor):
    """``image``, ``problem`` and ``solution``; the rewards get the ``solution`` and its answer, ``ground_truth``."""

    def __init__(self, system: str | None = None) -> None:
        self.system = CLEVR_SYSTEM if system is None else system

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        if row.get("image") is None:
            raise RowError("image", "is missing")
        solution = text_of(row, "solution")
        found = _ANSWER.search(solution)
        return {
            "messages": conversation(f"{IMAGE_MARK}{text_of(row, 'problem')}", system=self.system),
            "images": [row["image"]],
            "user_data": [("ground_truth", (found.group(1) if found else solution).strip()), ("solution", solution)],
        }
