"""The in-process benchmarks and the GPU check, on shapes that a CPU runs in a moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.paths import default_model_dir
from kernels.bench.case import Ceilings
from tools.bench import answers, breakdown, first_answer, lora, steps, throughput, transformers_peer
from tools.bench.__main__ import format_table, main, missed
from tools.bench.gates import compare, verdict
from tools.bench.parts import Part, ResultLog, gpu_parts, run_parts
from tools.bench.shapes import CONFIGS, matrix_parameters
from tools.bench.workload import full_jobs, make_jobs, sample_jobs

TINY = ("--model", "tiny", "--device", "cpu")


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(folder: Path, *codes: str, limit_s: float = 30.0, left_s: float = 60.0) -> list[dict]:
    """Results of parts that run these programs in parallel."""
    parts = [Part(f"part {i}", ("-uc", code), limit_s) for i, code in enumerate(codes)]
    record = ResultLog(folder)
    try:
        return run_parts(parts, record, left_s)
    finally:
        record.close()


def result(part: str, told: list[dict], status: int | str = 0) -> dict:
    return {"part": part, "status": status, "time_s": 1.0, "rows": told, "last_lines": ["so"]}


def test_the_benchmark_is_the_published_one():
    jobs = make_jobs(256)
    assert sum(len(job.prompt) for job in jobs) == 142_827
    assert sum(job.num_output for job in jobs) == 133_966
    assert sample_jobs(is_tiny=False) == full_jobs(is_tiny=False)[:64]


@pytest.mark.parametrize(
    ("name", "decode_floor_ms"), [("llama-3.1-8b", 3.52), ("qwen3-0.6b", 0.30)]
)
def test_floors_of_published_shapes(name, decode_floor_ms):
    """One sequence of 1,024 tokens at 4.3 TB/s, as computed by hand."""
    config = CONFIGS[name]
    per_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * 128
    moved = 2 * sum(matrix_parameters(name)) + 1024 * per_token
    assert moved / 4.3e12 * 1e3 == pytest.approx(decode_floor_ms, abs=0.01)


def test_steps_are_measured_against_their_floors(capsys):
    assert steps.main(TINY) == 0
    told = rows(capsys.readouterr().out)
    assert [row["case"] for row in told] == [
        "tiny prefill 96",
        "tiny prompt 16 launched",
        "tiny prompt 16 captured",
        "tiny decode 1 x 24",
        "tiny decode 3 x 40",
    ]
    assert all(row["time_ms"] > 0 and row["floor_ms"] > 0 for row in told)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_steps_of_quantised_weights_have_smaller_floors(capsys, monkeypatch, kind):
    ceilings = Ceilings(bytes_per_s=1e12, flops_per_s=1e15)  # reading takes the longest
    monkeypatch.setattr(steps, "measure", lambda _: ceilings)
    floors = {}
    for given in ([], ["--quantization", kind]):
        assert steps.main([*TINY, *given]) == 0
        told = [row for row in rows(capsys.readouterr().out) if "decode" in row["case"]]
        name = " ".join(["tiny", *given[1:]])
        assert [row["case"] for row in told] == [f"{name} decode 1 x 24", f"{name} decode 3 x 40"]
        assert all(row["time_ms"] > row["floor_ms"] > 0 for row in told)
        floors[name] = [row["floor_ms"] for row in told]
    plain, quantised = floors.values()
    weights_ms = 2 * sum(matrix_parameters("tiny")) / 1e9
    share = {"int4": 9 / 32, "fp8": 1 / 2}[kind]  # of the bytes of bfloat16
    for whole, less in zip(plain, quantised, strict=True):
        assert whole - less == pytest.approx((1 - share) * weights_ms)


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


def test_the_cost_of_adapters_is_told(capsys):
    """Whether it is within its gate depends on the machine."""
    assert lora.main(["tiny", "--rows", "3", "--adapters", "2", "--steps", "2"]) in (0, 1)
    (row,) = rows(capsys.readouterr().out)
    assert row["case"] == "tiny 3 rows, 2 adapters"
    assert row["time_ms"] > 0
    assert row["plain_time_ms"] > 0
    assert len(row["rounds"]) == 5


@pytest.mark.slow
def test_quire_and_transformers_do_the_same_work(capsys):
    assert throughput.main(TINY) == 0
    ours = rows(capsys.readouterr().out)
    assert transformers_peer.main(TINY) == 0
    (theirs,) = rows(capsys.readouterr().out)
    assert theirs["case"] == ours[-1]["case"]
    assert theirs["output_tokens"] == ours[-1]["output_tokens"]
    results = [result("throughput", ours), result("transformers", [theirs])]
    compare(results)
    assert theirs["quire_ratio"] == ours[-1]["tokens_per_s"] / theirs["tokens_per_s"]
    assert f"(1/{theirs['quire_ratio']:.1f})" in format_table(results)


def test_batch_invariant_steps_are_held_against_plain_ones(capsys):
    assert steps.main(TINY) == 0
    plain = rows(capsys.readouterr().out)
    assert steps.main([*TINY, "--batch-invariant"]) == 0
    invariant = rows(capsys.readouterr().out)
    plain = [row for row in plain if "launched" not in row["case"]]
    assert [row["case"] for row in invariant] == [row["case"] for row in plain]
    results = [result("steps tiny", plain), result("invariant tiny", invariant)]
    compare(results)
    for row, twin in zip(invariant, plain, strict=True):
        assert row["share_of_plain"] == twin["time_ms"] / row["time_ms"]
        is_met = row["share_of_plain"] >= 0.9
        assert (verdict("invariant tiny", row) == "pass") == is_met
        assert f"({row['share_of_plain']:.2f}x)" in format_table(results)
        assert "share_of_plain" not in twin


@pytest.mark.slow
def test_the_first_answer_is_timed_twice(capfd):
    assert first_answer.main(TINY) == 0
    told = rows(capfd.readouterr().out)
    assert [row["case"] for row in told] == ["tiny first start", "tiny second start"]
    assert all(row["time_s"] > 0 for row in told)


def test_where_the_time_of_a_step_goes_is_told(capsys):
    assert breakdown.main(TINY) == 0
    told = rows(capsys.readouterr().out)
    begins = [index for index, row in enumerate(told) if "busy_us" in row]
    assert [told[index]["case"] for index in begins] == ["tiny 2 x 24", "tiny prefill 96"]
    for begin, end in pairwise([*begins, len(told)]):
        step, *kernels = told[begin:end]
        # Of the same steps: those of "time_us" ran before, perhaps on a quieter machine.
        assert 0 < step["busy_us"] <= step["profiled_us"]
        assert step["time_us"] > 0
        assert len(kernels) > 1
        assert sum(kernel["time_us"] for kernel in kernels) <= step["busy_us"] * 1.001


def test_time_in_which_kernels_overlap_counts_once():
    assert breakdown.covered([(5, 8), (0, 2), (1, 4), (1, 3), (8, 9)]) == 8
    assert breakdown.covered([]) == 0


def test_the_check_runs_on_a_cpu(tmp_path, capsys):
    arguments = ["--device", "cpu", "--tiny", "--only", "throughput", "--output", str(tmp_path)]
    assert main(arguments) == 0
    *_, table, _, verdicts, last = capsys.readouterr().out.splitlines()
    assert "tiny 2 sequences" in table
    assert verdicts == "nothing missed"
    assert json.loads(last)["failed"] == []
    saved = rows((tmp_path / "results.jsonl").read_text())
    assert [row["case"] for row in saved] == ["tiny 6 sequences", "tiny 2 sequences"]
    assert {row["part"] for row in saved} == {"throughput"}


@pytest.mark.slow
def test_the_whole_check_runs_on_a_cpu(tmp_path):
    assert main(["--device", "cpu", "--tiny", "--output", str(tmp_path)]) == 0
    saved = rows((tmp_path / "results.jsonl").read_text())
    assert len({row["part"] for row in saved}) == 6
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_says_so(capsys):
    assert main([]) == 0
    assert "no CUDA device here" in capsys.readouterr().out


def test_a_slow_part_cannot_eat_the_rest(tmp_path):
    code = 'import time; print(\'{"case": "one"}\', flush=True); print(\'{"ca\'); time.sleep(60)'
    (told,) = run(tmp_path, code, limit_s=2.0)
    assert told["status"] == "out of time"
    assert told["rows"] == [{"case": "one"}]
    assert told["time_s"] < 30
    assert "out of time" in format_table([told])
    assert rows((tmp_path / "results.jsonl").read_text()) == [{"part": "part 0", "case": "one"}]


def test_a_part_that_hangs_tells_where(tmp_path):
    code = "import time\ndef wait_for_ever(): time.sleep(60)\nprint('so far')\nwait_for_ever()"
    (told,) = run(tmp_path, code, limit_s=2.0)
    assert told["last_lines"] == ["so far"]
    assert "in wait_for_ever" in (tmp_path / "log.txt").read_text()


def test_each_test_is_told_of_as_it_ends(tmp_path):
    """Even if one kills the whole process."""
    file = tmp_path / "test_three.py"
    file.write_text(
        "import os\ndef test_good(): pass\n"
        "def test_bad():\n    wanted = 'a reason'\n    raise ValueError(wanted)\n"
        "def test_last(): os._exit(9)\n"
    )
    plugin = ("-p", "tools.bench.pytest_rows", "-p", "no:cacheprovider", "-c", os.devnull)
    part = Part("tests", ("-m", "pytest", "-q", *plugin, str(file)), 30.0)
    record = ResultLog(tmp_path / "out")
    (told,) = run_parts([part], record, 60.0)
    record.close()
    assert [row["is_right"] for row in told["rows"]] == [True, False]
    assert told["rows"][1]["case"].endswith("test_three.py::test_bad")
    assert "ValueError: a reason" in told["rows"][1]["failed"]
    assert "wanted = 'a reason'" in (tmp_path / "out" / "log.txt").read_text()


def test_what_a_part_has_started_ends_with_it(tmp_path):
    """Otherwise it would take the GPU's memory from the next one."""
    child = "import time; time.sleep(60)"
    code = f"import subprocess as s, sys; p = s.Popen([sys.executable, '-c', {child!r}]); "
    (told,) = run(tmp_path, code + "print('child', p.pid); p.wait()", limit_s=2.0)
    (words,) = told["last_lines"]
    pid = int(words.split()[1])
    for _ in range(100):
        if not is_alive(pid):
            return
        time.sleep(0.1)
    raise AssertionError("it runs on")


def is_alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_parts_of_a_group_run_side_by_side_and_fail_alone(tmp_path):
    """The second waits for a file that the first writes; the third exits at once."""
    there = tmp_path / "there"
    wait = "import os, time\nwhile not os.path.exists({0!r}): time.sleep(0.01)\nprint({1!r})"
    codes = (
        f"open({str(there)!r}, 'w').close()",
        wait.format(str(there), '{"case": "met"}'),
        "raise SystemExit('no such thing')",
    )
    told = run(tmp_path, *codes)
    assert [each["status"] for each in told] == [0, 0, 1]
    assert told[1]["rows"] == [{"case": "met"}]
    assert "no such thing" in format_table(told)
    assert "[part 2] no such thing" in (tmp_path / "log.txt").read_text()


def test_where_no_time_is_left_a_part_is_not_begun(tmp_path):
    (told,) = run(tmp_path, "open('never', 'w')", left_s=1.0)
    assert "no time was left" in told["status"]


def test_all_parts_together_have_a_limit(tmp_path, capsys):
    arguments = ["--device", "cpu", "--tiny", "--output", str(tmp_path), "--limit-s", "1"]
    assert main(arguments) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(told["failed"]) == 6


@pytest.mark.slow
def test_the_tests_of_a_gpu_are_the_files_that_hold_some(tmp_path):
    """Other files would need what serves HTTP, and their plugins' options are not passed."""
    ((tests, *_), *_) = gpu_parts((), ())
    files = [word for word in tests.command if word.endswith(".py")]
    assert any(file.endswith("test_triton_gpu.py") for file in files)
    assert not any("tests/server" in file for file in files)
    command = [*tests.command, "--collect-only", "-p", "no:asyncio"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_missed_is_told_last_and_briefly():
    slow = [{"case": f"decode {i} x 1024", "share_of_floor": 0.1} for i in range(100)]
    wrong = [{"case": "norm", "is_right": False, "failed": "out of resource"}]
    lines = missed([result("steps 8b", slow), result("kernels", wrong, status=1)])
    assert "MISS" in lines[0]
    assert lines[-1] == "  and 62 more"
    assert missed([result("kernels", wrong)]) == ["  kernels, norm: WRONG: out of resource"]
    assert missed([result("kernels", [{"case": "norm", "is_right": True, "error": 0.0}])]) == []


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
    (told,) = run(tmp_path, "import json, sys; print(json.dumps({'case': sys.executable}))")
    assert told["rows"] == [{"case": sys.executable}]
