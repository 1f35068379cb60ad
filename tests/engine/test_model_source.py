"""Model names: on disk, and on a fake Hub."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

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


def adapter_files():
    """An adapter of the embedded model that leaves nothing of its answers, and a page about it."""
    name = "base_model.model.model.layers.3.mlp.down_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.ones(1, 704),
        f"{name}.lora_B.weight": torch.linspace(-9, 9, 256)[:, None],
    }
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]}
    return {
        "README.md": b"of no use here",
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": save(tensors),
    }


def test_an_offline_engine_downloads_all_that_it_is_given_by_name(tmp_path):
    directories = {"org/model": default_model_dir(), "org/draft": embedded_draft_dir()}
    repositories = {
        name: {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        for name, directory in directories.items()
        if directory is not None
    }
    is_text = re.compile(r"tokenizer.*|.*\.jinja").fullmatch
    texts = {name: data for name, data in repositories["org/model"].items() if is_text(name)}
    repositories |= {"org/text": texts, "org/adapter": adapter_files()}
    code = (
        "from engine import LLM, SamplingParams\n"
        "from engine.errors import InvalidParameter\n"
        "names = {'draft_model': 'org/draft', 'tokenizer': 'org/text'}\n"
        "with LLM('org/model', **names, use_tqdm=False) as llm:\n"
        "    params = SamplingParams(temperature=0.0, max_tokens=8)\n"
        "    for lora in (None, 'org/adapter@main', 'org/adapter@main'):\n"
        "        asked = {'params': params, 'lora': lora, 'use_tqdm': False}\n"
        "        (found,) = llm.generate('The capital of France is', **asked)\n"
        "        print(found.outputs[0].text)\n"
        "    try: llm.generate('A', lora='org/none')\n"
        "    except InvalidParameter as error: print(error.param, error)\n"
    )
    with fake_hub(repositories) as hub:
        env = hub.environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, adapted, again, refused = done.stdout.splitlines()
    assert "Paris" in plain
    assert adapted == again != plain
    assert refused.startswith("lora there is no directory org/none, and no model of the Hub: ")
    assert "%" not in done.stderr  # no bars
    weights = [path.split("/")[2] for path in hub.asked if path.endswith("model.safetensors")]
    assert set(weights) == {"model", "draft", "adapter"}
    asked = "\n".join(hub.asked)
    assert "/org/text/resolve/" in asked
    assert "/org/adapter/resolve/1111111111111111111111111111111111111111/README.md" not in asked
    # To count its bytes and to fetch them; nothing is asked when it is named again.
    assert asked.count("api/models/org/adapter/revision/main") == 2
