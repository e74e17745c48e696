"""What logging writes, and what it never does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from harness.logs import logging_as_before
from twinkle.core.process.logs import configure_logging, redact


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    with logging_as_before():
        yield


def test_our_records_and_the_libraries_come_in_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO", json=True)
    structlog.get_logger().info("lease.acquired", mesh="first", epoch=3)
    logging.getLogger("celery.worker").warning("lost %s", "broker", extra={"data": {"args": "a prompt"}})
    ours, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert (ours["event"], ours["mesh"], ours["epoch"], ours["level"]) == ("lease.acquired", "first", 3, "info")
    assert theirs["event"] == "lost broker"
    assert "a prompt" not in str(theirs)


def test_away_from_a_terminal_a_record_is_one_line_of_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO", json=False)
    structlog.get_logger().warning("nudge.failed", mesh="first", error="a\nb")
    structlog.get_logger().debug("not.shown")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "event=nudge.failed mesh=first" in lines[0]


def test_a_logger_that_has_been_used_follows_when_logging_changes(capsys: pytest.CaptureFixture[str]) -> None:
    logger = structlog.get_logger()
    configure_logging("INFO", json=True)
    logger.info("first")
    configure_logging("INFO", json=False)
    with capture_logs() as captured:
        logger.info("second")

    assert [line["event"] for line in captured] == ["second"]
    assert "second" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key tml-abcdefghijkl_-123 refused", "key tml-*** refused"),
        ("redis://:s3cret@127.0.0.1:1/0", "redis://:***@127.0.0.1:1/0"),
        ("postgresql://user:s3cret@host/name", "postgresql://user:***@host/name"),
        ("http://127.0.0.1:8765/path", "http://127.0.0.1:8765/path"),
    ],
)
def test_keys_and_passwords_are_blotted_out(text: str, shown: str) -> None:
    assert redact(None, "info", {"event": "x", "error": text})["error"] == shown
