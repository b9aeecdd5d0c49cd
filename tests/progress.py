"""What a run of several tests at a time prints: how many have ended, and which have failed."""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest

PERIOD_S = 30.0


class Progress:
    """Print a count in place of a letter for each test, and each failure when it occurs.

    On a terminal, one line is rewritten; elsewhere there is a line every 30 s.
    """

    def __init__(self) -> None:
        self._began = self._printed = time.monotonic()
        self._ended = self._failed = 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        self._reporter = session.config.pluginmanager.getplugin("terminalreporter")

    def pytest_report_header(self) -> str:
        return "collecting the tests takes about a minute; then follows how many have ended"

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(
        self,
    ) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
        category, _, word = yield
        return category, "", word

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed += 1
            self._print(f"FAILED {report.nodeid} - could not be collected", stays=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._ended += report.when in ("teardown", "???")  # ???: its worker has died
        if report.failed:
            self._failed += 1
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            why = f" - {message.splitlines()[0]}" if message else ""
            self._print(f"FAILED {report.nodeid}{why}", stays=True)
        now = time.monotonic()
        if self._reporter.isatty or now - self._printed >= PERIOD_S:
            self._printed = now
            self._print(
                f"{self._ended:,} of {self._session.testscollected:,} tests,"
                f" {self._failed} failed, {now - self._began:.0f} s"
            )

    def _print(self, line: str, stays: bool = False) -> None:
        if not self._reporter.isatty:
            self._reporter.write_line(line)
            return
        self._reporter.rewrite(line, erase=True)
        if stays:
            self._reporter.write("\n")


def register(config: pytest.Config) -> None:
    """Do so in a run of several tests at a time, in the process that prints."""
    workers = config.getoption("numprocesses", default=None)
    if workers and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(), "progress")
