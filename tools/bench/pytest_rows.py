"""A pytest plugin that prints a line of JSON for each test as it ends, and why it failed.

pytest's own summary is lost if a test hangs and a time limit ends the whole run.
"""

from __future__ import annotations

import json

import pytest

_MAX_REASON_CHARS = 200  # characters of a reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called for the setup, call and teardown of each test; with xdist, in the controller."""
    if report.failed:
        why = report.longreprtext.strip()
        print(f"\n{report.nodeid} ({report.when}):\n{why}", flush=True)
        crash = getattr(report.longrepr, "reprcrash", None)  # absent if a fixture is missing
        reason = why.splitlines()[-1] if crash is None else crash.message.splitlines()[0]
        row = {"case": report.nodeid, "is_right": False, "failed": reason[:_MAX_REASON_CHARS]}
        print(json.dumps(row), flush=True)
    elif report.when == "call" and report.passed:
        print("\n" + json.dumps({"case": report.nodeid, "is_right": True}), flush=True)
