"""A tiny GPT-OSS as it is published: experts in MXFP4, everything else dense."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests import tiny_models
from tests.engine.quantization import stored

_SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "vocab_size": 160},
}


def save(directory: Path) -> tuple[Path, Path]:
    """Save the model, and the dense one with the dequantised weights."""
    dense = tiny_models.save("gpt_oss", directory / "dense", **_SHAPE)
    held = tiny_models.save("gpt_oss", directory / "mxfp4", **_SHAPE)
    tensors, quantised = load_file(dense / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantised[name] = tensor
            continue
        made = [stored.mxfp4(expert.T.contiguous()) for expert in tensor.float()]
        codes, exponents, meant = (torch.stack(parts) for parts in zip(*made, strict=True))
        quantised |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
        tensors[name] = meant.float().transpose(1, 2).contiguous()
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    save_file(quantised, held / "model.safetensors", {"format": "pt"})
    tiny_models.edit_config(
        held, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}
    )
    return held, dense
