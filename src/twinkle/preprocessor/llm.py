"""Data sets of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinkle.data_format.columns import Row
from twinkle.data_format.row_error import RowError
from twinkle.preprocessor.base import HELPFUL, Preprocessor, conversation, text_of

FINAL_MARK = "####"
MATH_SYSTEM = "Solve the problem step by step. Put the final answer into \\boxed{}."
GSM8K_SYSTEM = f"Solve the problem step by step. End with a line that holds '{FINAL_MARK} ' and the answer alone."
COUNTDOWN_SYSTEM = (
    "Think about the question first, then answer it. Put your thoughts into <think> </think> and what you have found"
    " into <answer> </answer>."
)


class SelfCognitionProcessor(Preprocessor):
    """``query`` and ``response``, in which ``{{NAME}}`` and ``{{AUTHOR}}`` stand for a model and for who made it."""

    def __init__(self, model_name: str | None = None, model_author: str | None = None) -> None:
        self.model_name = model_name or "twinkle robot"
        self.model_author = model_author or "twinkle lab"

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        query, response = (
            text_of(row, column).replace("{{NAME}}", self.model_name).replace("{{AUTHOR}}", self.model_author)
            for column in ("query", "response")
        )
        return {"messages": conversation(query, system=HELPFUL, assistant=response)}


class AlpacaProcessor(Preprocessor):
    """``instruction``, perhaps ``input``, and ``output``."""

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        question = text_of(row, "instruction")
        if row.get("input"):
            question = f"{question}\n{text_of(row, 'input')}"
        return {"messages": conversation(question, assistant=text_of(row, "output"))}


class CompetitionMathProcessor(Preprocessor):
    """``problem`` and ``solution``, to learn from."""

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        return {"messages": conversation(text_of(row, "problem"), assistant=text_of(row, "solution"))}


class CompetitionMathGRPOProcessor(Preprocessor):
    """``problem``, to be answered; the ``solution`` goes to the rewards, as ``user_data``."""

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        return {
            "messages": conversation(text_of(row, "problem"), system=MATH_SYSTEM, assistant=""),
            "user_data": [("solution", text_of(row, "solution"))],
        }


class CountdownProcessor(Preprocessor):
    """``nums`` from which ``target`` (or ``response``) is to be calculated; the rewards get both in ``user_data``."""

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        numbers, target = row.get("nums"), row.get("target", row.get("response"))
        if not isinstance(numbers, Sequence) or isinstance(numbers, str):
            raise RowError("nums", f"is {numbers!r}, must be a list of numbers")
        if target is None:
            raise RowError("target", "is missing, and there is no response either")
        question = (
            f"Make an equation out of the numbers {list(numbers)} whose result is {target}. Take every number exactly"
            " once, and of the operations only +, -, * and /. Put the equation's left side into <answer> </answer>, as"
            " in <answer> (1 + 2) / 3 </answer>."
        )
        return {
            "messages": conversation(question, system=COUNTDOWN_SYSTEM),
            "user_data": [{"target": target, "nums": list(numbers)}],
        }


class GSM8KProcessor(Preprocessor):
    """``question`` and ``answer``; the number after ``####`` goes to the rewards, as ``ground_truth``.

    Args:
        system: The system message, in place of one that asks for such an end.
        add_assistant: Whether the answer is part of the conversation, to learn from.
    """

    def __init__(self, system: str | None = None, add_assistant: bool = False) -> None:
        self.system = GSM8K_SYSTEM if system is None else system
        self.add_assistant = add_assistant

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        answer = text_of(row, "answer")
        _, mark, number = answer.rpartition(FINAL_MARK)
        if not mark:
            raise RowError("answer", f"has no {FINAL_MARK} with the result after it")
        assistant: Any = answer if self.add_assistant else None
        return {
            "messages": conversation(text_of(row, "question"), system=self.system, assistant=assistant),
            "user_data": [("ground_truth", number.strip().replace(",", ""))],
        }
