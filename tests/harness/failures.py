"""A pytest plugin (`-p tests.harness.failures`): each failure goes to the file FAILURES as it happens.

A run that is cut off, or that pytest-xdist spread over processes, otherwise ends without its summary.
"""

from __future__ import annotations

import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["FAILURES"], "a") as file:
            file.write(f"##### {report.nodeid} [{report.when}, {report.duration:.0f} s]\n{report.longreprtext}\n")
