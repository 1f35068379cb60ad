"""Every kind of benchmark case runs, agrees with its peers, and has a floor."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.bench import measure
from kernels.bench.__main__ import main, report
from kernels.bench.case import Case, Ceilings
from kernels.bench.suite import MakeCase, full_suite, tiny_suite
from kernels.bench.variants import TRIALS, applied, outcome, trials_of


@pytest.mark.slow
@pytest.mark.parametrize("make", tiny_suite(), ids=lambda make: make.args[0])
def test_cases_agree_with_their_peers(make: MakeCase) -> None:
    case = make(torch.device("cpu"), torch.float32)
    assert case.error() <= min(case.tolerance, 1e-4)
    assert case.floor_s(1e9, 1e9) > 0
    # A disagreement is detected.
    wrong = replace(case, peers={"off by one": lambda: case.run() + 1})
    assert not wrong.error() <= case.tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [make for make in tiny_suite() if list(trials_of(make))],
    ids=lambda make: make.args[0],
)
def test_variants_compute_the_same(make: MakeCase) -> None:
    for trial in trials_of(make):
        names = {"launch", *(name for each in trial.variants for name in each.constants)}
        before, launched = {name: getattr(trial.module, name) for name in names}, set()
        for variant in trial.variants:
            with applied(trial, variant):
                launched.add(trial.module.launch)
                assert all(getattr(trial.module, n) == v for n, v in variant.constants.items())
                assert outcome(make, torch.device("cpu"), torch.float32, None)["is_right"]
        assert len(launched) == len(trial.variants)
        assert {name: getattr(trial.module, name) for name in names} == before


def test_every_trial_has_a_case() -> None:
    tried = {id(trial) for make in full_suite() for trial in trials_of(make)}
    assert tried == set(map(id, TRIALS))


def test_the_full_suite_has_every_kind_of_the_tiny_one() -> None:
    kinds = [{make.func for make in suite} for suite in (full_suite(), tiny_suite())]
    assert kinds[0] == kinds[1]


def test_the_report_tells_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Everything but the clock, which needs a GPU: a substitute reports 1 ms for everything."""
    monkeypatch.setattr(measure, "median_s", lambda run: 1e-3)
    ones = torch.ones(4)

    def make(_: str, device: torch.device, dtype: torch.dtype, *, ours: float) -> Case:
        return Case("named", lambda: ones * ours, {"peer": lambda: ones}, bytes_moved=5e5)

    ceilings = Ceilings(1e9, 1e12)
    arguments = (torch.device("cpu"), torch.float32, ceilings, tmp_path)
    assert report([partial(make, "right", ours=1.0)], *arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == []
    assert report([partial(make, "wrong", ours=float("nan"))], *arguments) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["failed"] == ["named"]
    assert told["results"][0]["share_of_floor"] == 0.5
    assert (tmp_path / "kernels.jsonl").read_text().count("\n") == 1


def test_a_case_that_cannot_run_is_wrong_and_the_others_still_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With check only, nothing is timed; with JSON output, each case is a line."""

    def make(name: str, device: torch.device, dtype: torch.dtype, *, works: bool) -> Case:
        if not works:
            raise RuntimeError("out of resource: shared memory\n(many lines)")
        return Case(name, lambda: torch.ones(4), {"peer": lambda: torch.ones(4)}, 1.0)

    suite: list[MakeCase] = [partial(make, "one", works=False), partial(make, "two", works=True)]
    cpu = torch.device("cpu")
    assert report(suite, cpu, torch.float32, None, None, json.dumps) == 1
    first, second, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"case": "one", "is_right": False, "failed": "out of resource: shared memory"}
    assert second == {"case": "two", "is_right": True, "error": 0.0}
    assert report(suite, cpu, torch.float32, None, None) == 1
    assert "WRONG" in capsys.readouterr().out.splitlines()[0]


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kernels.bench"])
    assert main() == 2
    assert "no CUDA device" in capsys.readouterr().err
