"""A process's scratch directory is removed at exit or, after a kill, by the next process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.scratch import ScratchDirectory

KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from engine.scratch import ScratchDirectory
scratch = ScratchDirectory("workers")
(scratch.path / "ledger").write_text("some")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = ScratchDirectory("workers")
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    (left,) = set(tmp_path.iterdir()) - {alive.path}
    assert (left / "ledger").exists()
    stranger = tmp_path / "quire-workers-of-somebody"  # it was never locked
    stranger.mkdir()

    other = ScratchDirectory("ranks")
    assert left.exists()  # it is not a scratch directory
    following = ScratchDirectory("workers")
    assert set(tmp_path.iterdir()) == {alive.path, other.path, following.path, stranger}
    assert following.path.stat().st_mode & 0o777 == 0o700
    for scratch in (alive, other, following):
        scratch.close()
    assert list(tmp_path.iterdir()) == [stranger]
