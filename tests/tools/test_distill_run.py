"""Whole runs with a tiny teacher: better than by labels alone, killed and resumed, in phases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.checkpoint import read_config
from engine.text.tokenizer import Tokenizer
from tests.tools.tiny_teacher import save_chats, save_teacher
from tools.distill import cli, models

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return save_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture
def common(teacher: Path, chats: Path) -> list[str]:
    """The settings of a run with few, short steps."""
    return [
        *(str(teacher), "--data", str(chats), "--student-layers", "1", "--student-hidden", "32"),
        *("--student-heads", "2", "--student-kv-heads", "1", "--row-tokens", "64"),
        *("--batch-rows", "2", "--validate-every", "10", "--save-every", "4", "--warm-up", "2"),
        *("--learning-rate", "1e-2", "--threads", "1", "--dtype", "float32"),
    ]


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def told(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "work/history.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_same_curve_and_weights(tmp_path, common, capsys):
    run = [*common, "--steps", "26", "--accumulate", "2"]
    assert cli.main([*run, "-o", str(tmp_path / "whole")]) == 0
    whole = told(capsys)
    command = [sys.executable, "-m", "server", "distill", *run, "-o", str(tmp_path / "parts")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    state = tmp_path / "parts" / "work" / "state.pt"
    while not state.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert cli.main([*run, "-o", str(tmp_path / "parts")]) == 0
    parts = told(capsys)
    assert parts["steps"] == whole["steps"] == 26
    assert parts["validation"] == whole["validation"]
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_student_comes_near_its_teacher_and_nearer_than_by_labels(tmp_path, common, capsys):
    validations = {}
    for name, weights in {
        "distilled": ["--kl", "1"],
        "labels": ["--kl", "0", "--hard", "1"],
    }.items():
        run = [*common, *weights, "--steps", "60", "-o", str(tmp_path / name)]
        assert cli.main(run) == 0
        validations[name] = told(capsys)["validation"]
    assert validations["distilled"]["kl"] < 0.7 * validations["labels"]["kl"]
    assert validations["labels"]["hard"] < validations["distilled"]["hard"]
    picture = (tmp_path / "distilled" / "curves.svg").read_text("utf-8")
    assert "validation kl" in picture
    assert picture.count("<polyline") == 5  # loss and kl, two validation metrics, agreement


def test_phases_with_hidden_states_and_attention(tmp_path, common, capsys):
    schedule = tmp_path / "schedule.json"
    phases = [
        {"steps": 6, "row_tokens": 32, "kl": 0, "hidden": 1, "attention": 1},
        {"steps": 6, "row_tokens": 64, "kl": 1, "hard": 0.5, "temperature": 2},
    ]
    schedule.write_text(json.dumps(phases), "utf-8")
    run = [*common, "--schedule", str(schedule), "--dtype", "auto", "-o", str(tmp_path / "out")]
    assert cli.main(run) == 0
    assert told(capsys)["steps"] == 12
    rows = [row for row in history(tmp_path / "out") if "rate" in row]
    assert {"hidden", "attention"} <= rows[0].keys()
    assert "kl" not in rows[0]
    assert {"kl", "hard"} <= rows[11].keys()
    assert rows[5]["hidden"] < rows[0]["hidden"]
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert student.config.num_hidden_layers == 1  # without the projections


def test_the_best_is_kept_and_a_phase_that_gains_nothing_ends(tmp_path, common, capsys):
    run = [*common, "--steps", "400", "--validate-every", "4", "--patience", "3"]
    assert cli.main([*run, "--learning-rate", "1.0", "-o", str(tmp_path / "out")]) == 0
    end = told(capsys)
    assert end["steps"] < 400
    validations = [row for row in history(tmp_path / "out") if "validation" in row]
    best = min(validations, key=lambda row: row["kl"])
    assert end["best_step"] == best["step"] == end["steps"] - 12
    assert end["validation"]["kl"] == pytest.approx(best["kl"], abs=1e-5)


def test_the_teachers_own_text_is_learned_from(tmp_path, common, capsys):
    run = [*common, "--generate", "12", "--generate-alone", "--generate-max-new-tokens", "8"]
    run += ["--generate-batch-rows", "4", "--steps", "4", "-o", str(tmp_path / "out")]
    assert cli.main(run) == 0
    assert told(capsys)["documents"] == 11  # one is used for validation
    path = tmp_path / "out" / "work" / "generated.jsonl"
    first = path.read_text("utf-8")
    rows = [json.loads(line) for line in first.splitlines()]
    assert len(rows) == 12
    assert all(0 < len(row["ids"]) - row["learn_from"] <= 8 for row in rows)
    path.write_text("".join(first.splitlines(keepends=True)[:6]) + '{"ids": [1', "utf-8")
    assert cli.main([*run, "--overwrite"]) == 0
    assert path.read_text("utf-8") == first  # the truncated part is generated again, identically


def test_another_run_in_the_same_place_is_refused(tmp_path, common, capsys):
    run = [*common, "--steps", "2", "-o", str(tmp_path / "out")]
    assert cli.main(run) == 0
    assert cli.main([*run, "--seed", "1"]) == 1
    assert "a run with another seed (0, now 1)" in capsys.readouterr().err
    assert cli.main([*run, "--seed", "1", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (["--data", "absent.jsonl"], "absent.jsonl: No such file"),
        (["--schedule", "absent.json"], "absent.json: No such file"),
        (["--data", "{}/ids.jsonl"], "a document has token 3072, and the teacher has 3072"),
        (["--batch-rows", "0"], "--batch-rows must be at least 1"),
        (["--patience", "-1"], "--patience must be at least 0"),
        (["--clip", "nan"], "--clip must be at least 0"),
        (["--threads", "-1"], "--threads must be at least 1"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--generate", "-1"], "--generate must be at least 0"),
        (["--generate-batch-rows", "0"], "--generate-batch-rows must be at least 1"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--student-hidden", "33"], "no llama model of this shape"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path, common, capsys, change, problem):
    (tmp_path / "ids.jsonl").write_text('{"ids": [5, 3072], "learn_from": 0}\n' * 2)
    filled = [part.replace("{}", str(tmp_path)) for part in change]
    assert cli.main([*common, "--steps", "2", "-o", str(tmp_path / "out"), *filled]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("quire distill: ")
    assert problem in said


def test_a_loss_that_is_lost_is_told(tmp_path, common, capsys):
    run = [*common, "--learning-rate", "1e18", "--clip", "1e30", "--warm-up", "0", "--steps", "9"]
    assert cli.main([*run, "-o", str(tmp_path / "out")]) == 1
    assert "a lower --learning-rate" in capsys.readouterr().err.splitlines()[-1]
    run[run.index("1e18")], run[-1] = "3e38", "1"  # the weights are lost, and no loss tells
    assert cli.main([*run, "-o", str(tmp_path / "lost")]) == 1
    assert "no validation gave a number" in capsys.readouterr().err.splitlines()[-1]


def test_a_student_ends_its_turns_where_its_teacher_does(tmp_path):
    """Also at tokens that config.json lacks, and with the words of older tokenizer files."""
    teacher = save_teacher(tmp_path / "teacher")
    generation = json.loads((teacher / "generation_config.json").read_text())
    generation |= {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.6}
    (teacher / "generation_config.json").write_text(json.dumps(generation))
    expected = Tokenizer.from_dir(teacher).encode("Two words, 12 digits.")
    parts = json.loads((teacher / "tokenizer.json").read_text())["model"]
    (teacher / "tokenizer.json").unlink()
    (teacher / "vocab.json").write_text(json.dumps(parts["vocab"]))
    (teacher / "merges.txt").write_text("\n".join(map(" ".join, parts["merges"])))
    named = json.loads((teacher / "tokenizer_config.json").read_text())
    named["tokenizer_class"] = "GPT2Tokenizer"
    (teacher / "tokenizer_config.json").write_text(json.dumps(named))
    model = models.load_model(teacher, torch.float32, torch.device("cpu"), eager_attention=False)
    out = tmp_path / "out"
    models.export(
        *(model, models.load_tokenizer(str(teacher)), out, torch.bfloat16, str(teacher)),
        model.generation_config,
    )
    assert set(read_config(str(out)).spec.eos_token_ids) == {0, 2}
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.6
    assert Tokenizer.from_dir(out).encode("Two words, 12 digits.") == expected


def test_no_data_is_told(tmp_path, teacher, capsys):
    assert cli.main([str(teacher), "-o", str(tmp_path / "out")]) == 1
    assert "give --data FILE or --generate N" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["absent", "/no/such/teacher"])
def test_a_teacher_that_is_nowhere_is_not_looked_for_on_the_hub(name, tmp_path, capsys):
    assert cli.main([name, "--generate", "1", "-o", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert told == f"quire distill: there is no model directory {name}\n"


def test_code_beside_a_model_is_not_run_even_if_somebody_types_yes(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    named = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]}
    told = {"model_type": "evil", "auto_map": {**named, "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": named}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    cpu = torch.device("cpu")
    for load in (
        models.load_config,
        models.load_tokenizer,
        lambda folder: models.load_model(folder, torch.float32, cpu, eager_attention=False),
    ):
        with pytest.raises(models.DistillError):
            load(str(tmp_path))
    assert not ran.exists()
