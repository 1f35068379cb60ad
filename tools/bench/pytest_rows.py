"""A plugin of pytest: a line of JSON for each test as it ends, and at once why it failed.

What pytest tells at its end is lost where a test hangs and a time limit ends all of them.
"""

from __future__ import annotations

import json

import pytest

_MOST = 200  # characters of a reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called for the set-up, the call and the end of each test; with xdist by the process that the
    others report to."""
    if report.failed:
        why = report.longreprtext.strip()
        print(f"\n{report.nodeid} ({report.when}):\n{why}", flush=True)
        crash = getattr(report.longrepr, "reprcrash", None)  # not where a fixture is missing
        told = why.splitlines()[-1] if crash is None else crash.message.splitlines()[0]
        row = {"case": report.nodeid, "is_right": False, "failed": told[:_MOST]}
        print(json.dumps(row), flush=True)
    elif report.when == "call" and report.passed:
        print("\n" + json.dumps({"case": report.nodeid, "is_right": True}), flush=True)
