"""The measurements built on the load generator, on minimal models."""

from __future__ import annotations

import json

import pytest

from loadtest import against_transformers, startup, waste
from loadtest.models import ModelShape, ensure_model
from loadtest.process import running_server


def test_a_server_that_cannot_start_is_told_with_its_output():
    with pytest.raises(RuntimeError, match=r"ended with status 1\n.*no model directory /no/such"):
        running_server(["/no/such"]).__enter__()


@pytest.mark.slow
def test_quire_and_transformers_say_the_same(tmp_path, capsys):
    shape = ModelShape("llama", 2, 64, 4, 2, 128, vocab=600)
    model = ensure_model(shape, tmp_path / "model", dtype="float32")
    out = tmp_path / "result.json"
    arguments = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--out", str(out)]
    sizes = ["--requests", "3", "--input-len", "12", "--output-len", "5", "--rounds", "1"]
    assert against_transformers.main([*arguments, *sizes, "--concurrency", "3"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads(out.read_text())
    assert told["same_texts"] == "4 of 4"
    assert told["ratio"] > 0
    assert str(tmp_path) not in out.read_text()


@pytest.mark.slow
def test_startup_and_waste_tell_figures(tmp_path, capsys):
    assert startup.main(["--runs", "1"]) == 0  # with all defaults
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["median_s"] > 0
    out = tmp_path / "waste.json"
    sizes = ["--requests", "4", "--input-len", "90", "--output-len", "6", "--limit", "0.5"]
    serve = ["--", "--num-threads", "1", "--kv-cache-memory-bytes", "32MiB"]
    assert waste.main([*sizes, "--concurrency", "2", "--out", str(out), *serve]) == 0
    assert "KV slots wasted" in capsys.readouterr().out
