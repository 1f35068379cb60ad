"""``quire quantize`` on the command line: the embedded model, bad input, a full disk."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from engine.paths import default_model_dir
from server.cli import main
from tests.servers import MODEL, ROOT, running_server
from tools.quantize.texts import make_windows

SHORT = ("--num-windows", "6", "--num-held-out", "2", "--window", "64")


@pytest.fixture(autouse=True)
def all_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write every line of progress, even for a quick run."""
    monkeypatch.setattr("server.cli.progress._LINE_PERIOD_S", 0.0)


def quantize(*argv: str | Path) -> int:
    return main(["quantize", *map(str, argv)])


def test_the_embedded_model_is_quantised_on_text_that_ships(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = default_model_dir(), tmp_path / "deep" / "out"
    assert quantize(model, "-o", out, *SHORT) == 0
    told = capsys.readouterr()
    assert "perplexity" in told.out
    assert f"quire serve {out}" in told.out
    assert "embedding the calibration text" in told.err
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["perplexity_before"] < report["perplexity_after"] * 1.01 < 4
    assert 0 < max(report["layers"][0]["linear_errors"].values()) < 0.05
    assert report["bytes_after"] < 0.45 * report["bytes_before"]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (Path(model) / name).read_bytes()
    card = (out / "README.md").read_text()
    assert card.startswith((Path(model) / "README.md").read_text().rstrip())
    assert "int4, gptq, groups of 64 inputs" in card
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["own.jsonl", "own.txt"])
def test_calibration_text_of_ones_own(name: str, tmp_path: Path) -> None:
    text = "The paged attention of a server keeps keys and values in blocks. " * 12
    chat = {"messages": [{"role": "user", "content": text}]}
    lines = "".join(json.dumps(line) + "\n" for line in (chat, {"text": text}))
    source = tmp_path / name
    source.write_text(text * 2 if name.endswith("txt") else lines)
    done = quantize(
        *(default_model_dir(), "-o", tmp_path / "out", "--calibration", source),
        *("--algorithm", "rtn", "--window", "64", "--num-held-out", "1"),
    )
    assert done == 0
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert 2 <= report["num_windows"] < 12


@pytest.mark.parametrize(
    ("num_windows", "num_held_out", "cut"),
    [(8, 16, (8, 16)), (1, 0, (1, 0)), (60, 16, (25, 8)), (20, 16, (20, 13)), (60, 0, (33, 0))],
)
def test_windows_are_as_asked_and_a_quarter_of_a_short_text_is_held_out(
    num_windows: int, num_held_out: int, cut: tuple[int, int]
) -> None:
    texts = [{"text": "1 2 3 4 5 6 7 8 9 " * 60}]
    asked = {"window": 32, "num_windows": num_windows, "num_held_out": num_held_out}
    windows = make_windows(Path(default_model_dir()), texts, **asked)
    assert (len(windows.calibration), len(windows.held_out)) == cut


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere", "-o", "{}/out"], "there is no model directory nowhere"),
        (["{model}", "-o", "{model}/out"], "lies within the model that is read"),
        (["{model}", "-o", "{}"], "is there already"),
        (["{model}", "-o", "{}/out", "--calibration", "{}/none.txt"], "none.txt: No such file"),
        (["{model}", "-o", "{}/out", "--calibration", "{}/bad.jsonl"], "bad.jsonl: line 2 is not"),
        (["{model}", "-o", "{}/out", "--calibration", "{}/odd.jsonl"], "line 1 has neither"),
        (["{model}", "-o", "{}/out", "--calibration", "{}/short.txt"], "must fill two windows"),
        (["{model}", "-o", "{}/out", "--questions", "{}/odd.jsonl"], "line 1 is no question"),
        (["{model}", "-o", "{}/out", "--questions", "{}/number.jsonl"], "line 1 is no question"),
        (["{model}", "-o", "{}/out", "--questions", "{}/role.jsonl"], "question 2: "),
        (["{model}", "-o", "{}/out", "--questions", "{}/long.jsonl"], "question 1 has "),
        (
            ["{model}", "-o", "{}/out", "--window", "8192", "--num-windows", "1"],
            "longer than the model's context",
        ),
        (["{model}", "-o", "{}/out", "--group-size", "100"], "64 or 32 would"),
        (["{model}", "-o", "{}/out", "--damping", "2"], "--damping is 2.0"),
        (["{bare}", "-o", "{}/out"], "tokenizer"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text"\n')
    (tmp_path / "odd.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "short.txt").write_text("short")
    question = {"messages": [{"role": "user", "content": "2 + 2?"}], "expected": "4"}
    for name, asked in (
        ("number", [question | {"expected": 4}]),
        ("role", [question, question | {"messages": [{"role": "wizard", "content": "?"}]}]),
        ("long", [question | {"messages": [{"role": "user", "content": "2 + " * 3000}]}]),
    ):
        lines = "".join(json.dumps(entry) + "\n" for entry in asked)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    bare = tmp_path / "bare"
    if "{bare}" in argv:
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).symlink_to(Path(default_model_dir()) / name)
    before = sorted(tmp_path.iterdir())
    filled = [
        part.replace("{model}", str(default_model_dir()))
        .replace("{bare}", str(bare))
        .replace("{}", str(tmp_path))
        for part in argv
    ]
    assert quantize(*filled) == 1
    told = capsys.readouterr().err
    assert told.startswith("quire quantize: ")
    assert said in told
    assert told.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_is_told_and_the_run_goes_on_once_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = (default_model_dir(), "-o", out, *SHORT, "--algorithm", "rtn")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))  # a layer fits, the model does not
    try:
        assert quantize(*argv) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith("quire quantize: ")
    assert "File too large" in told[-1]
    assert not out.exists()
    parts = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out.partial/parts/*")}
    assert len(parts) == 4
    assert quantize(*argv) == 0
    assert "judging the held-out text" in capsys.readouterr().err  # and no layer is repeated
    assert (out / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "algorithm", "may_lose"),
    [
        ("int8", "rtn", 3),
        ("w8a8", "gptq", 3),
        ("fp8", "rtn", 3),
        ("int4", "gptq", 9),
        ("int4", "awq", 9),
        ("int4", "awq+gptq", 9),
    ],
)
def test_held_out_questions_are_still_answered(
    scheme: str, algorithm: str, may_lose: int, tmp_path: Path
) -> None:
    """At eight bits at most one percent point is lost, at four bits three; 277 of 300 before."""
    questions = ROOT / "tests" / "demo" / "heldout.jsonl"
    done = quantize(
        *(default_model_dir(), "-o", tmp_path / "out", "--questions", questions),
        *("--scheme", scheme, "--algorithm", algorithm),
    )
    assert done == 0
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    accuracy = report["accuracy"]
    assert accuracy["right_before"] == 277
    assert accuracy["right_after"] >= accuracy["right_before"] - may_lose


def test_what_was_written_is_served(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert quantize(default_model_dir(), "-o", out, *SHORT, "--num-held-out", "0") == 0
    with running_server(tmp_path / "log", str(out), "--served-model-name", MODEL) as server:
        answer = server.chat("What is the capital of France?").json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
