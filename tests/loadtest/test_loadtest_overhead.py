"""The overhead benchmark, from flags to JSON."""

from __future__ import annotations

import json
import os

import pytest

from loadtest.machine import cpu_s, process_tree, tree_cpu_s
from loadtest.overhead import main


@pytest.mark.slow
def test_overhead_from_flags_to_json(tmp_path, capsys):
    file = tmp_path / "overhead.json"
    flags = ["--concurrency", "2", "--rounds", "1", "--step-ms", "1", "--out", str(file)]
    assert main([*flags, "--endpoint", "chat", "--", "--max-num-seqs", "64"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads(file.read_text())
    paced, flat_out = told["runs"]
    assert (paced["step_ms"], flat_out["step_ms"]) == (1.0, 0.0)
    for run in told["runs"]:
        assert run["tokens_per_s"] > 0
        assert run["cpu_us_per_token"] > 0
        assert set(run["cpu_us_per_token_by_role"]) <= {"api", "engine", "template"}


def test_the_process_tree_and_its_time():
    own = os.getpid()
    assert process_tree(own)[0] == own
    assert cpu_s(own) > 0
    assert (tree_cpu_s(own) or 0) >= cpu_s(own)
    assert process_tree(2**22 + 1) == []
    assert tree_cpu_s(2**22 + 1) is None
