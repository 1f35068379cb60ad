"""The CPU kernels' benchmark runs, and checks each kernel before timing it."""

from __future__ import annotations

import json

import pytest
import torch

from kernels.bench import cpu
from kernels.cpu.native import build

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """Skip the ceilings, which take seconds; restore the number of threads."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(cpu, "read_gb_s", lambda: 1.0)
    monkeypatch.setattr(cpu, "matmul_gflop_s", lambda: 1.0)
    yield
    torch.set_num_threads(threads)


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = cpu.main(["--threads", "1", "--seconds", "0", "--only", "add and norm"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert status == 0
    assert [result["case"] for result in results] == [f"add and norm {n}" for n in (1, 16, 512)]


@pytest.mark.slow
def test_layers_with_a_state_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    status = cpu.main(["--threads", "1", "--seconds", "0", "--only", "decode 1"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert status == 0
    cases = {result["case"] for result in results}
    assert {"delta rule decode 1", "selective scan decode 16", "gated norm decode 1"} <= cases


def test_a_wrong_kernel_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu.ours, "silu_mul", lambda x: x.chunk(2, dim=-1)[0])
    assert cpu.main(["--threads", "1", "--seconds", "0", "--only", "silu"]) == 1
    assert "WRONG" in capsys.readouterr().out
