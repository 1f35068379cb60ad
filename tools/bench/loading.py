"""The peak memory of loading a model, above what the process used before.

    python -m tools.bench.loading --mebibytes 400 --quantization int8

A sharded bfloat16 checkpoint of that size is created and loaded in a separate process. Prints a
line of JSON: the size of the weights in memory, the peak, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HIDDEN, _INNER, _VOCABULARY = 1024, 4096, 4096
_SHARDS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--mebibytes", type=int, default=400, help="of the checkpoint")
    made.add_argument("--quantization", choices=("int8", "int4"), help="round while loading")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--model", type=Path, help="load this instead")
    made.add_argument("--child", action="store_true", help="be the measured process")
    options = made.parse_args(argv)
    if options.child:
        print(json.dumps(_measure(str(options.model), options.dtype, options.quantization)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or write_checkpoint(Path(scratch), options.mebibytes * 2**20)
        print(json.dumps(peak_of_load(directory, options.dtype, options.quantization)))
    return 0


def write_checkpoint(directory: Path, num_bytes: int) -> Path:
    """Write a sharded bfloat16 Llama of about ``num_bytes``; all layers have the same weights."""
    import torch
    from safetensors.torch import save_file

    kv = _HIDDEN // 4
    matrices = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (kv, _HIDDEN),
        "self_attn.v_proj": (kv, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    layer_bytes = 2 * sum(outputs * inputs for outputs, inputs in matrices.values())
    num_layers = max(_SHARDS, round((num_bytes - 2 * _VOCABULARY * _HIDDEN) / layer_bytes))
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"},
        **{"hidden_size": _HIDDEN, "intermediate_size": _INNER, "vocab_size": _VOCABULARY},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
        **{"num_hidden_layers": num_layers, "max_position_embeddings": 2048},
        **{"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    }
    (directory / "config.json").write_text(json.dumps(config))
    noise = torch.randn(_INNER * _HIDDEN).mul_(0.02).to(torch.bfloat16)
    norm = torch.ones(_HIDDEN, dtype=torch.bfloat16)
    mapping: dict[str, str] = {}
    for shard in range(_SHARDS):
        tensors: dict[str, torch.Tensor] = {}
        if shard == 0:
            tensors["model.embed_tokens.weight"] = noise.view(_VOCABULARY, -1)
            tensors["model.norm.weight"] = norm
        for i in range(shard, num_layers, _SHARDS):
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{i}.{name}.weight"] = norm.clone()
            for name, shape in matrices.items():
                part = noise[: shape[0] * shape[1]].view(shape)
                tensors[f"model.layers.{i}.{name}.weight"] = part.clone()
        file = f"model-{shard + 1:05}-of-{_SHARDS:05}.safetensors"
        save_file(tensors, directory / file)
        mapping |= dict.fromkeys(tensors, file)
    index = {"weight_map": mapping}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def peak_of_load(directory: Path, dtype: str, quantization: str | None) -> dict[str, Any]:
    """Load in a separate process and return what ``--child`` prints.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-m", "tools.bench.loading", "--child", "--model", str(directory)]
    command += ["--dtype", dtype]
    if quantization is not None:
        command += ["--quantization", quantization]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def _measure(model: str, dtype: Any, quantization: Any) -> dict[str, Any]:
    from engine.config import CacheConfig, EngineConfig
    from engine.models.checkpoint import read_config, read_headers
    from engine.paths import default_model_dir
    from engine.runner import load_runner

    def config(path: str) -> EngineConfig:
        return EngineConfig(
            model=path,
            dtype=dtype,
            quantization=quantization,
            num_threads=1,
            cache=CacheConfig(num_blocks=8),
        )

    load_runner(config(str(default_model_dir())))  # load libraries and compile kernels beforehand
    headers = [] if read_config(model).gguf else read_headers(Path(model))
    entries = [entry for header in headers for entry in header.entries.values()]
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    begun_s = time.perf_counter()
    runner = load_runner(config(model))
    took_s = time.perf_counter() - begun_s
    peak, held = _memory("VmHWM") - before, runner.info.memory.weights_bytes
    return {
        "weights_bytes": held,
        "peak_bytes": peak,
        "ratio": round(peak / held, 3),
        "largest_tensor_bytes": max((entry.num_bytes for entry in entries), default=0),
        "load_s": round(took_s, 2),
    }


def _memory(field: str) -> int:
    """A field of this process's status in /proc, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"the system does not tell {field}")


if __name__ == "__main__":
    sys.exit(main())
