"""Model names: on disk, and on a fake Hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.paths import default_model_dir, embedded_draft_dir
from tests.hub import fake_hub

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"another library's",
    "tokenizer.json": b"{}",
    "tiny-Q4_K_M.gguf": b"GGUF four",
    "tiny-q8_0.gguf": b"GGUF eight",
}


@pytest.fixture(scope="module")
def hub():
    with fake_hub({"org/tiny": FILES, "org/gated": FILES}) as running:
        yield running


def resolve(hub, home, *names, load_format="auto", **variables):
    """The result for each name, or its error, in a process that knows no other hub."""
    code = (
        "import sys; from engine.errors import ModelLoadError\n"
        "from engine.model_source import resolve_model\n"
        "for name in sys.argv[2:]:\n"
        "    try: print(resolve_model(name, sys.argv[1]))\n"
        "    except ModelLoadError as error: print('refused:', error)\n"
    )
    env = hub.environment(home) | {"PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, load_format, *names], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def names_in(directory):
    return sorted(str(p.relative_to(directory)) for p in Path(directory).rglob("*") if p.is_file())


def test_names_of_the_hub(hub, tmp_path):
    plain, tagged = resolve(hub, tmp_path, "org/tiny", "org/tiny@v2")
    (eight,) = resolve(hub, tmp_path / "eight", "org/tiny:Q8_0")
    assert names_in(plain) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(tagged) / "model.safetensors").read_bytes() == b"weights v2"
    assert Path(eight).name == "tiny-q8_0.gguf"
    assert Path(eight).read_bytes() == b"GGUF eight"
    (pickles,) = resolve(hub, tmp_path / "other", "org/tiny", load_format="bin")
    assert names_in(pickles) == ["config.json", "pytorch_model.bin", "tokenizer.json"]
    (random,) = resolve(hub, tmp_path / "none", "org/tiny", load_format="dummy")
    assert names_in(random) == ["config.json", "tokenizer.json"]
    # What was fetched before is available without a network.
    asked = len(hub.asked)
    again, absent = resolve(hub, tmp_path, "org/tiny", "org/other", HF_HUB_OFFLINE="1")
    assert again == plain
    assert "HF_HUB_OFFLINE is set, and the model is not in the cache" in absent
    assert len(hub.asked) == asked


def test_what_the_hub_does_not_give_is_told_in_a_line(hub, tmp_path):
    names = ["org/none", "org/tiny@v9", "org/gated", "org/tiny:Q2_K", "org/tiny:q", "no//name"]
    expected = [
        "the Hub has no such model, or HF_TOKEN is needed to see it",
        "it has no revision v9",
        "it is gated: accept its terms on its page and set HF_TOKEN",
        "org/tiny:Q2_K: the model has no GGUF file with that in its name",
        "org/tiny:q: several files have that in their names: ",
        "there is no model directory no//name",
    ]
    for line, words in zip(resolve(hub, tmp_path, *names), expected, strict=True):
        assert line.startswith("refused: ")
        assert words in line
    (found,) = resolve(hub, tmp_path, "org/gated", HF_TOKEN="hf_secret")
    assert names_in(found) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_hub_out_of_reach(tmp_path):
    with fake_hub({}) as gone:
        pass
    (line,) = resolve(gone, tmp_path, "org/tiny")
    assert line.startswith("refused: there is no directory org/tiny, and no model of the Hub: ")


def test_an_offline_engine_downloads_its_model_and_its_draft_model(tmp_path):
    directories = {"org/model": default_model_dir(), "org/draft": embedded_draft_dir()}
    repositories = {
        name: {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        for name, directory in directories.items()
        if directory is not None
    }
    code = (
        "from engine import LLM, SamplingParams\n"
        "with LLM('org/model', draft_model='org/draft', use_tqdm=False) as llm:\n"
        "    params = SamplingParams(temperature=0.0, max_tokens=8)\n"
        "    (found,) = llm.generate('The capital of France is', params, use_tqdm=False)\n"
        "print(found.outputs[0].text)\n"
    )
    with fake_hub(repositories) as hub:
        env = hub.environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "%" not in done.stderr  # no bars
    fetched = {path.split("/")[2] for path in hub.asked if path.endswith("/model.safetensors")}
    assert fetched == {"model", "draft"}
