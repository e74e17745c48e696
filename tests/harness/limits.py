"""A pytest plugin: what goes wrong fails alone, and the run goes on. Above all what takes too long.

pytest-timeout limits the bodies of tests (``timeout_func_only``). Over a whole test its alarm would go off wherever
pytest is at that moment, and between two phases nobody is there to take the blame: the run ends with an internal error.
So the start and the end of each fixture get an alarm of their own, which is off while pytest itself is at work.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Generator
from types import FrameType

import pytest

_INI = "fixture_timeout"
_DEFAULT_LIMIT_S = 300.0
_SLOW_S = 30.0
_WORDS = "took longer than"
_WORDS_OF_PYTEST_TIMEOUT = "from pytest-timeout"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(_INI, "seconds that the start, and the end, of one fixture may take", default=str(_DEFAULT_LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    limit_s = float(request.config.getini(_INI))
    start, end = (_Alarm(f"the {phase} of fixture {fixturedef.argname!r}", limit_s) for phase in ("start", "end"))
    fixturedef.addfinalizer(end.stop)  # the first to be added is the last to be called
    start.start()
    try:
        return (yield)
    finally:
        start.stop()
        fixturedef.addfinalizer(end.start)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell a failure without the lines of its source rather than end the run, where CPython cannot parse them.

    Before 3.11.8 ``ast.parse`` fails when another thread parses at the same time (CPython's issue 106905).
    """
    try:
        return (yield)
    except SystemError:
        style, item.config.option.tbstyle = item.config.option.tbstyle, "native"
        try:
            return pytest.TestReport.from_item_and_call(item, call)
        finally:
            item.config.option.tbstyle = style


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was stopped, and what was slow, whose limit is the next to be hit on a busy machine."""
    reports = [
        report
        for outcome in terminalreporter.stats.values()
        for report in outcome
        if isinstance(report, pytest.TestReport)
    ]
    stopped = [report for report in reports if report.failed and _is_time_out(report)]
    slow = sorted((report for report in reports if report.duration > _SLOW_S), key=lambda report: -report.duration)
    for title, found in (("stopped by a time limit", stopped), (f"slower than {_SLOW_S:.0f} s", slow)):
        if found:
            terminalreporter.section(f"{len(found)} {title}")
        for report in found:
            terminalreporter.line(f"{report.duration:8.1f} s  {report.when:<8}  {report.nodeid}")


class _Alarm:
    """SIGALRM in the main thread, unless another alarm is on: within a test's body, the test's is."""

    def __init__(self, what: str, limit_s: float) -> None:
        self._what = what
        self._limit_s = limit_s
        self._before: object = None
        self._is_on = False

    def start(self) -> None:
        if signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            return
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        self._is_on = True

    def stop(self) -> None:
        if self._is_on:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)  # type: ignore[arg-type]
            self._is_on = False

    def _ring(self, number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        pytest.fail(f"{self._what} {_WORDS} {self._limit_s:g} s")


def _is_time_out(report: pytest.TestReport) -> bool:
    return _WORDS in report.longreprtext or _WORDS_OF_PYTEST_TIMEOUT in report.longreprtext
