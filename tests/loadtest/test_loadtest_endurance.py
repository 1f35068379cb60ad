"""The endurance test: from flags to JSON, and detection of each kind of failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import Client
from loadtest.endurance.run import main
from loadtest.endurance.samples import Sample, growth_per_1000, leaks, longest_stall_s

FLAGS = ["--requests", "150", "--kinds", "20", "--in-flight", "8", "--longest", "16"]


def sample(number: int, **changes: float) -> Sample:
    """A sample of a server that answers a hundred requests per second without growing."""
    steady: dict[str, Any] = {
        "at_s": float(number),
        "num_answered": 100 * number,
        "rss_bytes": 10**8,
        "num_files": 50,
        "num_threads": 8,
        "num_tokens": 1000.0 * number,
        "num_open": 4.0,
    }
    return Sample(**(steady | changes))


def run_of(change: Callable[[int], dict[str, float]]) -> list[Sample]:
    return [sample(number, **change(number)) for number in range(100)]


def test_a_steady_server_has_no_fault() -> None:
    samples = run_of(lambda number: {})
    assert growth_per_1000(samples) == 0
    assert longest_stall_s(samples) == 0
    assert leaks(samples) == []


def test_growth_is_told_by_requests_and_that_of_the_beginning_is_none() -> None:
    leaking = run_of(lambda number: {"rss_bytes": 10**8 + 100 * number * 500})
    assert growth_per_1000(leaking) == pytest.approx(500_000)
    warming_up = run_of(lambda number: {"rss_bytes": 10**8 + min(number, 9) * 10**7})
    assert growth_per_1000(warming_up) == 0


@pytest.mark.parametrize("what", ["num_files", "num_threads"])
def test_files_and_threads_that_stay_are_told(what: str) -> None:
    assert leaks(run_of(lambda number: {what: 50 + number // 10}))[0].startswith(what)
    assert leaks(run_of(lambda number: {what: 50 + number % 4})) == []


def test_a_stall_counts_while_somebody_waits() -> None:
    def still(number: int) -> dict[str, float]:
        return {"num_tokens": 1000.0 * (number if number < 40 else max(40, number - 7))}

    assert longest_stall_s(run_of(still)) == 7
    assert longest_stall_s(run_of(lambda number: still(number) | {"num_open": 0.0})) == 0


def test_a_server_that_keeps_its_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "endurance.json"
    assert main([*FLAGS, "--out", str(out), "--", "--num-gpu-blocks-override", "12"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads(out.read_text())
    assert told["requests"] == told["answered"] + told["cancelled"] == 150
    assert 0 < told["streamed"] < told["answered"]
    assert told["num_problems"] == 0


@pytest.mark.slow
def test_tokens_told_to_another_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch, kept = Client.fetch, []

    async def crossed(client: Client, method: str, path: str, body: Any = None) -> bytes:
        received = await fetch(client, method, path, body)
        if path != "/v1/completions" or body.get("stream"):
            return received
        kept.append(received)
        return kept[-2] if len(kept) % 30 == 0 else received

    monkeypatch.setattr(Client, "fetch", crossed)
    assert main([*FLAGS, "--streamed", "0", "--cancelled", "0"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["num_problems"] >= 4
    assert "in place of" in told.err
