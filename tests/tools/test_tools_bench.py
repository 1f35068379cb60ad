"""The benches in process and the check of a GPU, on shapes that a CPU runs in a moment."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from engine.paths import default_model_dir
from tools.bench import answers, first_answer, steps, throughput, transformers_peer
from tools.bench.__main__ import format_table, main
from tools.bench.gates import compare_with_peer, verdict
from tools.bench.parts import Part, gpu_parts, run_part
from tools.bench.shapes import CONFIGS, matrix_parameters
from tools.bench.workload import full_jobs, make_jobs, sample_jobs

TINY = ("--model", "tiny", "--device", "cpu")


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_the_benchmark_is_the_published_one():
    jobs = make_jobs(256)
    assert sum(len(job.prompt) for job in jobs) == 142_827
    assert sum(job.num_output for job in jobs) == 133_966
    assert sample_jobs(is_tiny=False) == full_jobs(is_tiny=False)[:64]


@pytest.mark.parametrize(
    ("name", "decode_floor_ms"), [("llama-3.1-8b", 3.52), ("qwen3-0.6b", 0.30)]
)
def test_floors_of_published_shapes(name, decode_floor_ms):
    """One sequence of 1,024 tokens at 4.3 TB/s, as worked out by hand."""
    config = CONFIGS[name]
    per_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * 128
    moved = 2 * sum(matrix_parameters(name)) + 1024 * per_token
    assert moved / 4.3e12 * 1e3 == pytest.approx(decode_floor_ms, abs=0.01)


def test_steps_are_measured_against_their_floors(capsys):
    assert steps.main(TINY) == 0
    told = rows(capsys.readouterr().out)
    assert [row["case"] for row in told] == [
        "tiny prefill 96",
        "tiny decode 1 x 24",
        "tiny decode 3 x 40",
    ]
    assert all(row["time_ms"] > row["floor_ms"] > 0 for row in told)


def test_a_case_that_does_not_fit_is_skipped(capsys, monkeypatch):
    monkeypatch.setattr(steps, "_TINY_CASES", [(10_000, 40)])
    assert steps.main(TINY) == 0
    assert rows(capsys.readouterr().out)[-1]["skipped"] == "the KV cache is too small"


def test_files_of_a_model_are_told_apart_by_answers_and_speed(capsys):
    model = str(default_model_dir())
    assert answers.main(["--child", "--num-questions", "3", model]) == 0
    (told,) = rows(capsys.readouterr().out)
    assert (told["model"], told["questions"], told["right"]) == ("model", 3, 3)
    assert min(told["tokens_per_cpu_s_1"], told["tokens_per_cpu_s_16"]) > 0


@pytest.mark.slow
def test_quire_and_transformers_do_the_same_work(capsys):
    assert throughput.main(TINY) == 0
    ours = rows(capsys.readouterr().out)
    assert transformers_peer.main(TINY) == 0
    (theirs,) = rows(capsys.readouterr().out)
    assert theirs["case"] == ours[-1]["case"]
    assert theirs["output_tokens"] == ours[-1]["output_tokens"]
    results = [
        {"part": "throughput", "status": 0, "time_s": 1.0, "rows": ours, "last_line": ""},
        {"part": "transformers", "status": 0, "time_s": 1.0, "rows": [theirs], "last_line": ""},
    ]
    compare_with_peer(results)
    assert theirs["quire_ratio"] == ours[-1]["tokens_per_s"] / theirs["tokens_per_s"]
    assert f"(1/{theirs['quire_ratio']:.1f})" in format_table(results)


@pytest.mark.slow
def test_the_first_answer_is_timed_twice(capfd):
    assert first_answer.main(TINY) == 0
    told = rows(capfd.readouterr().out)
    assert [row["case"] for row in told] == ["tiny first start", "tiny second start"]
    assert all(row["time_s"] > 0 for row in told)


def test_the_check_runs_on_a_cpu(tmp_path, capsys):
    arguments = ["--device", "cpu", "--tiny", "--only", "throughput", "--output", str(tmp_path)]
    assert main(arguments) == 0
    *_, table, last = capsys.readouterr().out.splitlines()
    assert "tiny 2 sequences" in table
    told = json.loads(last)
    assert told["failed"] == []
    saved = (tmp_path / "throughput.jsonl").read_text()
    assert rows(saved) == told["results"][0]["rows"]


@pytest.mark.slow
def test_the_whole_check_runs_on_a_cpu(tmp_path):
    assert main(["--device", "cpu", "--tiny", "--output", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.jsonl"))) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_says_so(capsys):
    assert main([]) == 0
    assert "no CUDA device here" in capsys.readouterr().out


def test_a_slow_part_cannot_eat_the_rest(tmp_path):
    code = 'import time; print(\'{"case": "one"}\', flush=True); print(\'{"ca\'); time.sleep(60)'
    result = run_part(Part("slow part", ("-uc", code), 2.0), tmp_path)
    assert result["status"] == "out of time"
    assert result["rows"] == [{"case": "one"}]
    assert result["time_s"] < 30
    assert "out of time" in format_table([result])
    assert sum(part.limit_s for part in gpu_parts(tmp_path, (), ())) <= 9 * 60


def test_a_part_that_fails_tells_its_last_line(tmp_path):
    result = run_part(Part("broken", ("-c", "raise SystemExit('no such thing')"), 30.0), tmp_path)
    assert result["status"] == 1
    assert "no such thing" in format_table([result])


@pytest.mark.parametrize(
    ("part", "row", "told"),
    [
        ("steps 8b", {"case": "llama-3.1-8b decode 32 x 1024", "share_of_floor": 0.8}, "pass"),
        ("steps 8b", {"case": "llama-3.1-8b decode 32 x 1024", "share_of_floor": 0.7}, "MISS"),
        ("steps 0.6b", {"case": "qwen3-0.6b decode 32 x 1024", "share_of_floor": 0.1}, ""),
        ("first answer", {"case": "qwen3-0.6b first start", "time_s": 12.0}, "MISS"),
        ("kernels", {"case": "norm", "is_right": False}, "WRONG"),
    ],
)
def test_verdicts(part, row, told):
    assert verdict(part, row).split(":")[0] == told


def test_children_run_under_this_interpreter(tmp_path):
    command = ("-c", "import json, sys; print(json.dumps({'case': sys.executable}))")
    result = run_part(Part("who", command, 30.0), tmp_path)
    assert result["rows"] == [{"case": sys.executable}]
