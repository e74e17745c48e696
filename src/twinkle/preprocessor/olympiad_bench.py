"""OlympiadBench: problems of olympiads, many of them with pictures."""

from __future__ import annotations

from typing import Literal

from twinkle.core.errors import InvalidInput
from twinkle.data_format.columns import Row
from twinkle.data_format.row_error import RowError
from twinkle.preprocessor.base import Preprocessor, conversation, text_of
from twinkle.preprocessor.mm import IMAGE_MARK

SYSTEMS = {
    "en": "Solve the problem step by step. Put the final answer into \\boxed{}, several of them separated by commas.",
    "zh": "请一步步解答下面的问题，并将最终答案写在 \\boxed{} 中；若有多个答案，请用逗号分隔。",
}
UNIT = {"en": "Give the answer in {}.", "zh": "答案的单位：{}。"}
IMAGE_COLUMNS = tuple(f"image_{number}" for number in range(1, 10))


class OlympiadBenchProcessor(Preprocessor):
    """``question``, perhaps with ``context``, ``unit`` and up to nine pictures; ``final_answer`` goes to the rewards.

    Args:
        system: The system message, in place of one that asks for a boxed answer.
        language: Of what is said besides the problem.
    """

    def __init__(self, system: str | None = None, language: Literal["zh", "en"] = "zh") -> None:
        if language not in SYSTEMS:
            raise InvalidInput("language", f"is {language!r}; send 'zh' or 'en'")
        self.system = SYSTEMS[language] if system is None else system
        self.language = language

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        images = [row[column] for column in IMAGE_COLUMNS if row.get(column) is not None]
        parts = [row.get("context"), text_of(row, "question")]
        if row.get("unit"):
            parts.append(UNIT[self.language].format(row["unit"]))
        answers = row.get("final_answer")
        if answers is None or not len(answers):
            raise RowError("final_answer", "is missing; a reward needs it")
        question = IMAGE_MARK * len(images) + "\n".join(str(part) for part in parts if part)
        made: Row = {
            "messages": conversation(question, system=self.system),
            "user_data": [("ground_truth", answers if isinstance(answers, str) else ", ".join(map(str, answers)))],
        }
        return {**made, "images": images}
