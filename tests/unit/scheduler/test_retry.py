"""What becomes of an operation that did not succeed."""

from __future__ import annotations

import pytest

from harness.clock import HandClock
from twinkle.core import errors
from twinkle.core.operation import Failure, FailureCategory
from twinkle.scheduler.retry import PutOff, Retry, decide


def _decide(error: Exception, *, attempt: int = 1, max_attempts: int = 3) -> Failure | Retry:
    return decide(error, attempt=attempt, max_attempts=max_attempts, incident="1f2e")


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidInput("rank", "too large"),
        errors.NotFound("no such"),
        errors.WindowFailed("w"),
        errors.UserError("u"),
    ],
)
def test_what_its_user_can_mend_fails_at_once_with_its_own_words(error: errors.UserError) -> None:
    assert _decide(error) == Failure(message=error.message, category=FailureCategory.USER, code=error.code)


@pytest.mark.parametrize("error", [errors.OutOfMemory("full"), errors.StorageUnavailable("away"), RuntimeError("bug")])
def test_what_may_pass_is_tried_again_until_the_attempts_are_used_up(error: Exception) -> None:
    verdicts = [_decide(error, attempt=attempt) for attempt in (1, 2, 3)]

    assert [type(verdict) for verdict in verdicts] == [Retry, Retry, Failure]
    assert isinstance(verdicts[2], Failure)
    assert verdicts[2].category is FailureCategory.SERVER
    assert "attempt 3 of 3" in verdicts[2].message


def test_the_pauses_double_up_to_a_limit() -> None:
    verdicts = [_decide(RuntimeError(), attempt=attempt, max_attempts=99) for attempt in range(1, 12)]
    delays = [verdict.delay_s for verdict in verdicts if isinstance(verdict, Retry)]

    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30]


def test_an_unexpected_error_shows_its_user_an_incident_and_nothing_of_itself() -> None:
    for attempt in (1, 3):
        verdict = _decide(RuntimeError("/srv/secret tml-key"), attempt=attempt)
        text = verdict.reason if isinstance(verdict, Retry) else verdict.message
        assert "incident 1f2e" in text
        assert "secret" not in text


def test_an_error_of_ours_that_is_not_transient_is_not_tried_again() -> None:
    verdict = _decide(errors.PoisonOperation("it died"))

    assert isinstance(verdict, Failure)
    assert (verdict.code, verdict.category) == ("poison", FailureCategory.SERVER)


def test_a_wrong_statement_is_not_tried_again_and_its_user_sees_the_incident_only() -> None:
    verdict = _decide(errors.StatementFailed("refused 'SELECT hat FROM lane'"))

    assert isinstance(verdict, Failure)
    assert (verdict.code, verdict.category) == ("internal", FailureCategory.SERVER)
    assert "incident 1f2e" in verdict.message and "lane" not in verdict.message


def test_a_store_that_does_not_answer_is_no_operations_fault_and_a_failed_device_may_be() -> None:
    errors_and_blame = {
        errors.StorageUnavailable("away"): False,
        errors.OutOfMemory("full"): True,
        RuntimeError(): True,
    }

    for error, is_suspect in errors_and_blame.items():
        verdict = _decide(error)
        assert isinstance(verdict, Retry) and verdict.is_suspect is is_suspect


def test_what_fails_for_months_is_tried_each_hour_and_what_succeeds_or_is_gone_begins_anew() -> None:
    clock = HandClock()
    failed: PutOff[str] = PutOff(clock)
    told = [failed.put_off("a")["next"] for _ in range(2000)]
    assert [told[0], told[1], told[-1]] == [
        f"it is left as it is, and tried again in {pause_s} s" for pause_s in (300, 600, 3600)
    ]
    assert failed.waiting() == {"a"}
    failed.forget("a")
    assert failed.waiting() == set()
    failed.put_off("a")
    clock.move(300)
    assert failed.waiting() == set()
    assert failed.put_off("a")["failures"] == 2
    clock.move(3 * 3600)
    assert failed.waiting() == set()
    assert failed.put_off("a")["failures"] == 1
