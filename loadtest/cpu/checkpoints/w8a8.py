"""Writes a model directory with int8 weights and dynamically quantised activations, for vLLM.

The layout is that of compressed-tensors: every linear layer's weight in int8 with one scale per
row, and a ``quantization_config`` that requests one activation scale per token, found at run time.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def ensure_w8a8(model: Path) -> Path:
    """Write ``model`` with its layers' matrices in int8 to a directory beside it."""
    import torch
    from safetensors.torch import load_file, save_file

    directory = model.with_name(f"{model.name}-w8a8")
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, directory)
    config = json.loads((model / "config.json").read_text())
    quantized = {**config, "quantization_config": _CONFIG}
    (directory / "config.json").write_text(json.dumps(quantized, indent=2))
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if "_proj.weight" in name:
            scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
            tensors[name] = (weight.float() / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.to(weight.dtype)
        else:
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
