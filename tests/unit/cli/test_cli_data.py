"""`twinkle data check` says what is wrong with a file before anything is trained on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.logs import logging_as_before
from harness.rows import conversation, own_data_cache, template_folder, write_jsonl
from twinkle.cli import main
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.template import Template

__all__ = ["own_data_cache", "template_folder"]

NO_TEXT = {"messages": [{"role": "user", "content": None}]}


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    with logging_as_before():
        yield


def check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["twinkle", "data", "check", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_it_says_what_the_report_of_a_script_says(
    tmp_path: Path, template_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [conversation(1), "", NO_TEXT, "{oops", conversation(2)])
    dataset = Dataset(DatasetMeta(str(path)), skip_unreadable=True)
    dataset.set_template(Template(str(template_folder)))

    told = check(monkeypatch, str(path), "--model", str(template_folder))
    text = capsys.readouterr().out
    as_json = check(monkeypatch, str(path), "--model", str(template_folder), "--json")
    found = json.loads(capsys.readouterr().out)

    report = dataset.report()
    assert told == as_json == 1
    assert text == f"{report}\n"
    assert found == json.loads(json.dumps(report.to_dict()))
    assert [problem["line"] for problem in found["problems"]] == [4, 3]


def test_rows_are_mapped_first_if_asked(
    tmp_path: Path, template_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": "Say hello.", "input": "", "output": "Hello."}, {"instruction": "", "input": ""}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)

    code = check(monkeypatch, str(path), "--model", str(template_folder), "--map", "AlpacaProcessor", "--json")

    found = json.loads(capsys.readouterr().out)
    assert (code, found["rows"], found["wrong"]) == (1, 2, 1)
    assert (found["problems"][0]["line"], found["problems"][0]["column"]) == (2, "output")


def test_a_file_without_a_single_row_is_told_line_by_line(
    tmp_path: Path, template_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ["{oops", "[1]"])

    assert check(monkeypatch, str(path), "--model", str(template_folder)) == 1
    assert f"{path}:2: is a list" in capsys.readouterr().out


def test_good_data_end_with_0_and_nothing_but_the_document_is_on_the_output(
    tmp_path: Path, template_folder: Path
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [conversation(1)])
    command = [
        sys.executable,
        "-m",
        "twinkle.cli",
        "data",
        "check",
        str(path),
        "--model",
        str(template_folder),
        "--json",
    ]

    done = subprocess.run(
        command, env={**os.environ, "HF_HOME": str(tmp_path / "hf")}, capture_output=True, text=True, check=True
    )

    assert json.loads(done.stdout)["wrong"] == 0


def test_a_missing_package_is_told_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['datasets'] = None; import twinkle.dataset as d; print(d.DatasetMeta); d.Dataset"

    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)

    assert "DatasetMeta" in done.stdout
    assert "ConfigError: data sets need datasets" in done.stderr
    assert "twinkle-queue[scripts]" in done.stderr
