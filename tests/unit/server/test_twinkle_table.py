"""Every method and path of the Twinkle dialect is answered, in words."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from harness.fake_worker import BASE_MODEL
from harness.twinkle_table import TABLE

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "twinkle-http.md"
NAMES = {"model": BASE_MODEL, "run": "nobody", "checkpoint": "weights/none", "request": "nothing"}
BODILESS = {"GET", "DELETE"}


@pytest.mark.parametrize("row", sorted(TABLE))
def test_a_row_of_the_table_is_answered(http: httpx.Client, row: str) -> None:
    method, path = row.split()

    answer = http.request(method, path.format(**NAMES), json=None if method in BODILESS else {})

    said = answer.json()
    assert answer.status_code != 405, said
    assert not str(said.get("detail", "")).startswith("no route"), said
    assert answer.status_code < 500 or "healthy" in said, said


def test_the_document_names_every_row() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")

    def is_named(row: str) -> bool:
        _, path = row.split()
        room, _, name = path.rpartition("/")
        return f"`{row}`" in written or (f"{room}/<method>`" in written and f"`{name}`" in written)

    assert [row for row in sorted(TABLE) if not is_named(row)] == []
