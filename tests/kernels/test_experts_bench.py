"""The benchmark of experts runs on small numbers of rows, and compares its two sides."""

from __future__ import annotations

import json

import pytest
import torch

from kernels.bench import experts
from kernels.cpu import linear

pytestmark = pytest.mark.skipif(not linear.is_available(), reason="no native kernels here")


def test_the_last_line_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "read_gb_s", lambda: 1.0)
    monkeypatch.setattr(experts, "matmul_gflop_s", lambda: 1.0)
    for name, value in {"_HIDDEN": 64, "_INNER": 32, "_EXPERTS": 4, "_TOP_K": 2}.items():
        monkeypatch.setattr(experts, name, value)
    threads = torch.get_num_threads()
    try:
        status = experts.main(["--threads", "1", "--rows", "1,5", "--layers", "2", "--rounds", "1"])
    finally:
        torch.set_num_threads(threads)
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert status == 0
    assert [(result["weights"], result["rows"]) for result in results] == [
        (kind, rows) for kind in ("float32", "bf16", "int8", "int4", "mxfp4") for rows in (1, 5)
    ]
