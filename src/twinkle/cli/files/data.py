"""``twinkle data check``: what is wrong with training data, before a device is busy with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from twinkle.cli.console import say
from twinkle.cli.exit_codes import EXIT_FOUND
from twinkle.core.errors import ConfigError
from twinkle.dataset import DatasetMeta, LazyDataset, Report, WrongRows


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """Which rows, and how a script would encode them."""

    file: str
    subset: str
    split: str
    template: str
    model: str
    max_length: int
    truncation_strategy: str
    use_chat_template: bool
    preprocessor: str | None
    init_args: str | None
    limit: int | None


def check(asked: DataCheck, *, as_json: bool) -> int:
    """Show the report; returns the exit code.

    Raises:
        ConfigError: Arguments are no JSON object.
        InvalidInput: There are no such rows, or no such template.
    """
    report = _report(asked)
    say(json.dumps(report.to_dict(), ensure_ascii=False) if as_json else str(report))
    return EXIT_FOUND if report.num_wrong else 0


def _report(asked: DataCheck) -> Report:
    meta = DatasetMeta(asked.file, asked.subset, asked.split)
    try:
        dataset = LazyDataset(meta, skip_unreadable=True)
    except WrongRows as error:
        # Not a single line can be read.
        report = Report(rows=error.count)
        for problem in error.problems:
            report.add_problem(problem)
        report.num_wrong = error.count
        return report
    dataset.set_template(
        asked.template,
        model_id=asked.model,
        max_length=asked.max_length,
        truncation_strategy=asked.truncation_strategy,
        use_chat_template=asked.use_chat_template,
    )
    if asked.preprocessor is not None:
        dataset.map(asked.preprocessor, init_args=_arguments(asked.init_args))
    return dataset.report(limit=asked.limit)


def _arguments(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--init-args: {text} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"--init-args: {text} is no JSON object")
    return arguments
