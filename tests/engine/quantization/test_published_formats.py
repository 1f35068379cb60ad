"""Quantised checkpoints with the keys and the tensors that their makers write."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.quantization.formats import read_format
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits
from tests.engine.models.test_text_parts import PUBLISHED as PARTS
from tests.engine.models.test_text_parts import published
from tests.engine.quantization import stored
from tests.engine.quantization.test_formats import _WIDTHS, FORMATS, _write

_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# Of Qwen3.5 with experts: only the experts are quantised.
_DENSE_RULES: dict[str, Any] = {
    **{"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}},
    **{"-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}},
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_AUTO_ROUND = {
    **{"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
    **{"group_size": 128, "sym": True, "data_type": "int", "iters": 0, "model_free": True},
    **{"autoround_version": "0.12.3", "low_gpu_mem_usage": True},
    "block_name_to_quantize": "model.layers",
    "extra_config": {"model.layers.0.linear_attn.in_proj_b": {"bits": 16, "data_type": "fp"}},
}
# As transformers 5 saves them again.
_RESAVED = {
    **{"act_group_aware": True, "backend": "auto", "batch_size": 1, "block_name_to_quantize": None},
    **{"cache_block_outputs": True, "damp_percent": 0.1, "dataset": None, "meta": None},
    **{"modules_in_block_to_quantize": None, "true_sequential": True, "tokenizer": None},
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3.5 FP8": {
        **{**_BLOCKS, "weight_per_tensor": False, "act_per_tensor": False},
        "modules_to_not_convert": ["lm_head", "model.language_model.layers.0.mlp.gate"],
    },
    "FP8 saved by transformers": {
        **{**_BLOCKS, "expert_dtype": "fp8", "modules_to_convert": None, "scale_fmt": "float"},
        **{"dequantize": False, "modules_to_not_convert": None},
    },
    "AutoFP8": {
        **{"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        "ignored_layers": ["lm_head"],
    },
    "Qwen3.5 GPTQ": {**_GPTQ, "checkpoint_format": "gptq", "dynamic": _DENSE_RULES},
    "Qwen3 GPTQ": {
        **{**_GPTQ, "hyb_act": False, "lm_head": False, "pack_dtype": "int32"},
        **{"meta": {"quantizer": ["gptqmodel:2.3.0"]}, "true_sequential": True},
    },
    "GPTQ of 2023": {**_GPTQ, "disable_exllama": True, "static_groups": False},
    "AWQ saved by transformers": {
        **{**_RESAVED, "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        **{"version": "gemm", "format": "gemm", "sym": True, "modules_to_not_convert": None},
    },
    "AutoRound": _AUTO_ROUND,
    "AutoRound in AWQ's layout": {**_AUTO_ROUND, "packing_format": "auto_round:auto_awq"},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_keys_of_published_checkpoints_are_read(kind):
    assert read_format(PUBLISHED[kind], "config.json").name


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "'packing_format' is 'auto_round:llm_co"),
        ({"data_type": "mx_fp"}, "'data_type' is 'mx_fp'; only 'int'"),
        ({"act_bits": 8}, "'act_bits' rounds activations"),
        ({"extra_config": {"model.layers.0.x": {"bits": 8}}}, "'extra_config' has .*layers.0.x"),
        ({"bits": 5}, "'bits' is 5"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "'bits' is 8; only 4"),
    ],
)
def test_what_autoround_may_hold_besides_is_refused(changes, told):
    with pytest.raises(ModelLoadError, match=told):
        read_format({**_AUTO_ROUND, **changes}, "config.json")


def test_bits_of_a_modules_own_are_refused():
    with pytest.raises(ModelLoadError, match="'dynamic' sets other bits"):
        read_format({**_GPTQ, "dynamic": {"lm_head": {}, "+:.*down_proj": {"bits": 8}}}, "here")


@pytest.mark.parametrize("kind", ["llama", "nemotron_h_moe"])
def test_mxfp8_of_modelopt(kind, tmp_path, monkeypatch):
    """Its section may be within the one of config.json, as in ModelOpt's own file."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)
    algorithm = {"quant_algo": "MXFP8", "group_size": 32, "exclude_modules": ["lm_head"]}
    config = {"quant_method": "modelopt", "quantization": algorithm}
    monkeypatch.setitem(FORMATS, "mxfp8", (stored.modelopt_mxfp8, config))
    directory, expected = _write(kind, "mxfp8", tmp_path, **_WIDTHS.get(kind, {}))
    torch.testing.assert_close(paged_logits(directory), expected, atol=2e-4, rtol=0)


def test_modelopts_config_may_name_no_more_than_the_method(tmp_path):
    """As that of Llama-3.3-70B-Instruct-FP4 does."""
    directory, _ = _write("llama", "nvfp4_modelopt", tmp_path, expect=False)
    tiny_models.edit_config(directory, quantization_config={"quant_method": "modelopt"})
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    own |= {"has_zero_point": False, "pre_quant_scale": False}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    config = read_config(str(directory)).quantization_config
    assert config is not None
    assert read_format(config, "here").name == "ModelOpt NVFP4"


_LAYOUTS = {"auto_gptq": "gptq4_sym", "auto_awq": "awq"}  # as FORMATS has them


@pytest.mark.parametrize("packing", _LAYOUTS)
def test_autorounds_codes_are_those_of_its_layout(packing, tmp_path, monkeypatch):
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)
    directory, expected = _write("llama", _LAYOUTS[packing], tmp_path)
    file = directory / "model.safetensors"
    tensors = {name: held for name, held in load_file(file).items() if "g_idx" not in name}
    save_file(tensors, file, {"format": "pt"})
    config = {**_AUTO_ROUND, "packing_format": f"auto_round:{packing}", "group_size": 32}
    tiny_models.edit_config(directory, quantization_config=config)
    torch.testing.assert_close(paged_logits(directory), expected, atol=1e-4, rtol=0)


def _float8(tensors: dict[str, torch.Tensor], block: tuple[int, int] | None):
    """Write matrices in float8 as transformers names their scales: stacked experts, too."""
    form = {"form": "scalar"} if block is None else {"form": "block", "block": block}
    write = functools.partial(stored.float8, name=".weight_scale_inv", **form)
    meant, found = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if "visual." in name or (not name.endswith("proj.weight") and "mlp.experts." not in name):
            continue
        stem, dot, _ = name.rpartition(".weight")
        written = [write(part.float()) for part in (tensor if tensor.ndim == 3 else tensor[None])]
        codes, scales = (
            torch.stack([parts[end] for parts, _ in written])
            for end in (".weight", ".weight_scale_inv")
        )
        meant[name] = torch.stack([values for _, values in written]).float().view(tensor.shape)
        found[name] = codes.view(tensor.shape)
        if tensor.ndim == 3:
            found[f"{name}_scale_inv"] = scales.view(len(codes), *(scales.shape[1:] or (1, 1)))
            found[f"{name}_activation_scale"] = torch.ones(len(codes))
        else:
            found[f"{stem}{dot}_scale_inv"] = scales[0]
            found[f"{stem}.activation_scale"] = torch.tensor(0.5)
    return found, meant


def _save_float8(kind: str, directory: Path, block: tuple[int, int] | None):
    if kind in PARTS:
        published(kind).save_pretrained(directory)
    else:
        tiny_models.save(kind, directory)
    file = directory / "model.safetensors"
    found, meant = _float8(load_file(file), block)
    save_file(meant, file, {"format": "pt"})
    expected = paged_logits(directory)  # compared with Hugging Face in tests/engine/models
    save_file(found, file, {"format": "pt"})
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}
    tiny_models.edit_config(directory, quantization_config=config)
    return found, expected


@pytest.mark.parametrize("block", [None, (16, 24)])
@pytest.mark.parametrize("kind", ["ministral3", "mistral4"])
def test_mistrals_scales_have_names_of_their_own(kind, block, tmp_path, monkeypatch):
    """Ministral 3, Devstral 2 and Mistral Small 4: the last has all experts in one tensor."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)
    found, expected = _save_float8(kind, tmp_path, block)
    stacked = any(name.endswith("mlp.experts.down_proj_scale_inv") for name in found)
    assert stacked == (kind == "mistral4")
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("block", [None, (16, 16)])
def test_stacked_experts_may_have_their_inputs_first(block, tmp_path, monkeypatch):
    """As Qwen3-VL's were published before they were rounded."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)
    found, expected = _save_float8("qwen3_vl_moe", tmp_path, block)
    for name, held in found.items():
        if "mlp.experts." in name and held.ndim == 3:
            found[name] = held.mT.contiguous()
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(paged_logits(tmp_path), expected, atol=1e-4, rtol=0)
