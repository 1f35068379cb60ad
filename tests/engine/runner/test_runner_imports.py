"""Modules that startup does not import because the model does not need them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# Loads the embedded model and prints the imported modules.
PROGRAM = """
import sys
from engine.config import CacheConfig, EngineConfig
from engine.paths import default_model_dir
from engine.runner import load_runner
load_runner(EngineConfig(model=str(default_model_dir()), cache=CacheConfig(memory_bytes=1 << 25)))
print(*sys.modules)
"""
NOT_WANTED = (
    *("transformers", "tokenizers", "jinja2", "triton", "sympy", "fastapi", "pydantic"),
    *("torch._dynamo", "torch._inductor"),
    *("engine.gguf.spec", "engine.gguf.weights", "engine.quantization.formats"),
    *("engine.runner.encoder_load", "engine.parallel.leader", "engine.grammar.llguidance_backend"),
)


def test_a_plain_model_is_loaded_without_what_others_need() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "torch" in imported
    assert imported.isdisjoint(NOT_WANTED), imported.intersection(NOT_WANTED)
