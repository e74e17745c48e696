"""Prompts, texts and rewards for jobs that learn from answers, without a tokenizer or a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.fake_worker import BASE_MODEL
from harness.training_jobs import MemoryTools
from twinkle.core.job import JsonObject
from twinkle.grading.grade import GraderFailed, ProblemKind, RewardRequest
from twinkle.jobs.data import DataRow, PreparedData

EXACT = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}


class PolicyTools(MemoryTools):
    """Our own twin: the answers to a prompt read 0, 1, 2, 0, ... in turn, and every row's own answer is 1."""

    def __init__(self, *, num_rows: int = 10) -> None:
        super().__init__(num_rows=num_rows)
        self.vocabularies: dict[str, str] = {}
        self.num_graded = 0
        self.slow = False

    async def read_rows(self, prepared: PreparedData, numbers: list[int]) -> list[DataRow]:
        rows = await super().read_rows(prepared, numbers)
        items: list[JsonObject] = [{"prompt": f"{row.number}?", "answer": "1"} for row in rows]
        return [DataRow(row.number, row.sequences, item, row.line) for row, item in zip(rows, items, strict=True)]

    async def decode(self, model: str, answers: Sequence[Sequence[int]]) -> list[str]:
        return [str(number % 3) for number, _ in enumerate(answers)]

    async def vocabulary(self, model: str) -> str:
        return self.vocabularies.get(model, "the only one")

    async def grade(self, tenant: str, request: RewardRequest) -> float:
        self.num_graded += 1
        if self.slow:
            raise GraderFailed(ProblemKind.TIMEOUT, f"{request.reward} took more than 5 s")
        return float(request.text == (request.truth or "1"))


def policy_spec(**values: Any) -> JsonObject:
    """Learning from answers of the fake worker's model."""
    return {"model": BASE_MODEL, "data": "file-a", "rank": 4, "grader": EXACT, "max_tokens": 3, **values}
