"""The load test of two keys, on a server whose model costs nothing: whole, but short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import fairness


def test_two_keys_of_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fairness.json"
    load = ["--round-s", "1", "--rounds", "1", "--noise", "0,2", "--in-flight", "8"]
    server = ["--load-format", "stub", "--stub-step-ms", "5", "--max-num-seqs", "4"]
    lengths = ["--input-len", "8", "--output-len", "4", "--policies", "fair", "--out", str(out)]
    assert fairness.main([*load, *lengths, "--", *server]) == 0
    told = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told
    fair = told["policies"]["fair"]
    assert fair["capacity_requests_per_s"] > 10
    assert [row["noise_shares"] for row in fair["noise"]] == [0, 2]
    for row in fair["noise"]:
        assert row["requests"] > 5
        assert row["failures"] == 0
        assert row["ttft_ms"]["p50"] > 0
    assert fair["p99_ratio"] > 0
    assert told["machine"]["cpu"]
