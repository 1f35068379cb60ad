"""A tiny model in each quantised format has the logits of its dequantised weights."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from kernels.cpu.linear import is_available
from tests import tiny_models
from tests.engine.handmade import load
from tests.engine.models.test_parity import paged_logits, prompt
from tests.engine.quantization import mxfp4_model, stored
from tests.tiny_shape import ABSENT

native = pytest.mark.skipif(not is_available(), reason="no native kernels here")

_SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "vocab_size": 160},
}
_DENSE = (
    "embed",
    "lm_head",
    "norm",
    "mlp.gate.",
    "block_sparse_moe.gate.",
    "mixer.gate.",
    "router",
)


def _compressed(written: str, weights: dict, **section):
    group = {"targets": ["Linear"], "weights": weights, **section}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _gptq(**keys):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, **keys}


def _int(bits: int, strategy: str, **keys):
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **keys}


def _float(strategy: str, bits: int = 8, **keys):
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **keys}


_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_bnb4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

# format -> how a matrix is written, and the entry in config.json.
FORMATS = {
    "gptq2": (functools.partial(stored.gptq, bits=2), _gptq(bits=2)),
    "gptq3": (functools.partial(stored.gptq, bits=3), _gptq(bits=3)),
    "gptq4": (stored.gptq, _gptq(sym=False)),
    # Zeros of 0, which are stored as 15.
    "gptq4_positive": (lambda weight: stored.gptq(weight.abs()), _gptq(sym=False)),
    "gptq4_sym": (functools.partial(stored.gptq, symmetric=True), _gptq(sym=True)),
    "gptq4_act": (functools.partial(stored.gptq, act_order=True), _gptq(desc_act=True)),
    "gptq4_v2": (functools.partial(stored.gptq, version=2), _gptq(checkpoint_format="gptq_v2")),
    "gptq4_all": (functools.partial(stored.gptq, group=-1), _gptq(group_size=-1)),
    "gptq8": (functools.partial(stored.gptq, bits=8, group=16), _gptq(bits=8, group_size=16)),
    "awq": (stored.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "w4a16": (
        functools.partial(stored.compressed_packed, group=32),
        _compressed("pack-quantized", _int(4, "group", group_size=32)),
    ),
    "w4a16_zeros": (
        functools.partial(stored.compressed_packed, group=32, symmetric=False),
        _compressed("pack-quantized", _int(4, "group", group_size=32, symmetric=False)),
    ),
    "w4a16_act": (
        functools.partial(stored.compressed_packed, group=32, act_order=True),
        _compressed("pack-quantized", _int(4, "group", group_size=32, actorder="group")),
    ),
    "w8a16": (
        functools.partial(stored.compressed_packed, bits=8),
        _compressed("pack-quantized", _int(8, "channel")),
    ),
    "w8a8": (
        stored.compressed_int8,
        _compressed("int-quantized", _int(8, "channel"), input_activations=_DYNAMIC),
    ),
    "w8_tensor": (
        functools.partial(stored.compressed_int8, per_tensor=True),
        _compressed("naive-quantized", _int(8, "tensor")),
    ),
    "fp8_compressed": (stored.float8, _compressed("float-quantized", _float("channel"))),
    "fp8_compressed_tensor": (
        functools.partial(stored.float8, form="one"),
        _compressed("float-quantized", _float("tensor")),
    ),
    "fp8_compressed_block": (
        functools.partial(stored.float8, form="block"),
        _compressed("float-quantized", _float("block", block_structure=[16, 32])),
    ),
    "nvfp4": (
        stored.nvfp4,
        _compressed("nvfp4-pack-quantized", _float("tensor_group", 4, group_size=16)),
    ),
    "nvfp4_modelopt": (
        stored.modelopt_nvfp4,
        {
            **{"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
            **{"producer": {"name": "modelopt"}, "kv_cache_scheme": {"num_bits": 8}},
        },
    ),
    "fp8_modelopt": (
        functools.partial(stored.float8, form="scalar"),
        {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt"}},
    ),
    "mxfp4_compressed": (
        stored.compressed_mxfp4,
        _compressed("mxfp4-pack-quantized", _float("group", 4, group_size=32)),
    ),
    "fp8_block": (
        functools.partial(stored.float8, form="block", name=".weight_scale_inv", block=(24, 40)),
        {"quant_method": "fp8", "weight_block_size": [24, 40], "activation_scheme": "dynamic"},
    ),
    "fp8_scalar": (
        functools.partial(stored.float8, form="scalar"),
        {"quant_method": "fp8", "fmt": "float8_e4m3fn"},
    ),
    "fp8_channel": (functools.partial(stored.float8, form="flat"), {"quant_method": "fbgemm_fp8"}),
    "nf4": (stored.nf4, _bnb4),
    "nf4_nested": (functools.partial(stored.nf4, nested=True), _bnb4),
    "nf4_as_bfloat16": (
        functools.partial(stored.nf4, storage=torch.bfloat16),
        {**_bnb4, "bnb_4bit_quant_storage": "bfloat16"},
    ),
    "bnb_int8": (
        stored.bitsandbytes_int8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
    ),
}


# Projections that are divisible by groups and words, as those of published models are.
_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 3}
_DELTA = {**_HEADS, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_WIDTHS = {
    "qwen3_next": {**_DELTA, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 8},
    "lfm2": {"num_hidden_layers": 3},
    "mamba2": {
        **{"num_heads": 8, "state_size": 14, "num_attention_heads": ABSENT},
        "intermediate_size": ABSENT,
    },
    "nemotron_h_moe": {
        **{"mamba_num_heads": 4, "mamba_head_dim": 32, "moe_intermediate_size": 32},
        **{"ssm_state_size": 14, "moe_shared_expert_intermediate_size": 64},
    },
}


def _is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and not any(word in name for word in _DENSE)


def _write(kind: str, written: str, directory, *, expect: bool = True, **changes):
    """Save a model in a format; returns the logits with the dequantised weights."""
    write, config = FORMATS[written]
    dense = tiny_models.save(kind, directory / "dense", **{**_SHAPE, **changes})
    tensors, quantised = load_file(dense / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if _is_quantised(name, tensor):
            parts, meant = write(tensor.float())
            quantised |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
            tensors[name] = meant.float()
        else:
            quantised[name] = tensor
    logits = None
    if expect:
        save_file(tensors, dense / "model.safetensors", {"format": "pt"})
        logits = _logits(dense)
    save_file(quantised, dense / "model.safetensors", {"format": "pt"})
    tiny_models.edit_config(dense, quantization_config=config)
    return dense, logits


def _logits(directory) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([prompt()])).logits[0]


@pytest.fixture
def widened(monkeypatch):
    """Compute in float32: native kernels, which compute in bfloat16, are disabled."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("written", FORMATS)
def test_logits_are_those_of_what_the_codes_stand_for(written, tmp_path):
    directory, expected = _write("llama", written, tmp_path)
    torch.testing.assert_close(paged_logits(directory), expected, atol=1e-4, rtol=0)


@native
@pytest.mark.parametrize("written", FORMATS)
def test_kernels_read_the_codes_as_they_are(written, tmp_path, caplog):
    """Within bfloat16's error on so small a model (0.02 to 0.05), with nothing dequantised."""
    directory, expected = _write("llama", written, tmp_path)
    with caplog.at_level("INFO"):
        logits = paged_logits(directory, dtype="bfloat16").float()
    assert float((logits - expected).norm() / expected.norm()) < 0.08
    assert "linear layers in codes: native kernels" in caplog.text
    assert "widened" not in caplog.text


@native
@pytest.mark.parametrize(
    ("written", "most"),
    [("gptq4_act", 0.75), ("awq", 0.75), ("nf4", 0.75), ("fp8_channel", 1.1), ("w8a8", 1.1)],
)
def test_the_memory_told_is_that_of_the_codes(written, most, tmp_path):
    """Bytes per weight of the linear layers, including scales, zeros and padding."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    directory, _ = _write("llama", written, tmp_path, expect=False, **shape)
    told = load(directory, dtype="bfloat16").info.memory.weights_bytes
    matrices = 128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 256
    dense = 2 * (2 * 160 * 128 + 3 * 128)
    assert 0.5 * matrices < told - dense < most * matrices


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("qwen2", "gptq4_act"),
        ("phi3", "awq"),
        ("gpt_neox", "w4a16_act"),
        ("cohere_qk", "fp8_block"),
        ("mixtral", "gptq4_act"),
        ("qwen3_moe", "fp8_block"),
        ("mixtral", "nvfp4_modelopt"),
        ("qwen3_next", "gptq4_act"),
        ("qwen3_5_text", "fp8_block"),
        ("olmo_hybrid", "w8a8"),
        ("lfm2", "w4a16"),
        ("mamba2", "w8a8"),
        ("nemotron_h_moe", "w8a8"),
        ("nemotron_h_moe", "fp8_block"),
    ],
)
def test_in_other_families_too(kind, written, tmp_path):
    """Biases, fused projections, other head orders, experts, stateful layers."""
    directory, expected = _write(kind, written, tmp_path, **_WIDTHS.get(kind, {}))
    atol = 2e-4 if kind in _WIDTHS else 1e-4  # see test_parity.py
    torch.testing.assert_close(paged_logits(directory), expected, atol=atol, rtol=0)


@pytest.mark.usefixtures("widened")
def test_modelopts_config_may_be_a_file_of_its_own(tmp_path):
    directory, expected = _write("llama", "nvfp4_modelopt", tmp_path)
    tiny_models.edit_config(directory, quantization_config=None)
    own = directory / "hf_quant_config.json"
    told = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": told}))
    torch.testing.assert_close(paged_logits(directory), expected, atol=1e-4, rtol=0)
    own.write_text(json.dumps({"quantization": {**told, "quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelLoadError, match="'quant_algo' is 'W4A8_AWQ'; supported: NVFP4"):
        paged_logits(directory)


@pytest.mark.usefixtures("widened")
def test_experts_in_mxfp4(tmp_path):
    directory, dense = mxfp4_model.save(tmp_path)
    expected = paged_logits(dense)  # compared with Hugging Face in tests/engine/models
    torch.testing.assert_close(paged_logits(directory), expected, atol=1e-4, rtol=0)


def _config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def _written(directory, written="gptq4"):
    return _write("llama", written, directory, expect=False, num_hidden_layers=1)[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quant_method": "hqq"}, "quantisation 'hqq' is not supported .known: auto-round, "),
        ({"bits": 5}, "'bits' is 5"),
        ({"bits": "4"}, "'bits' must be a positive integer"),
        ({"group_size": 0}, "'group_size' must be a positive integer"),
        ({"rotation": "hadamard"}, "unsupported keys: 'rotation'"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, "'dynamic' sets other bits"),
        ({"checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin'"),
        ({"group_size": 16}, r"q_proj.qzeros' has shape \[2, 8\], config.json asks for \[4, 8\]"),
        ({"bits": 8}, r"asks for \[16, 64\]"),
    ],
)
def test_what_a_config_cannot_say_is_one_line(changes, told, tmp_path):
    directory = _written(tmp_path)
    _config(directory, **changes)
    with pytest.raises(ModelLoadError, match=told) as raised:
        paged_logits(directory)
    assert "\n" not in str(raised.value)
    assert str(directory) in str(raised.value)


_GATE = "model.layers.0.mlp.gate_proj"


def _changed(tensors: dict, name: str, change):
    return {**tensors, name: change(tensors[name])}


def _without(tensors: dict, name: str):
    return {key: tensor for key, tensor in tensors.items() if key != name}


def _set(tensor: torch.Tensor, value) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


def _state(**changes):
    def change(raw):
        state = json.loads(bytes(raw.tolist())) | changes
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


_NF4_STATE = f"{_GATE}.weight.quant_state.bitsandbytes__nf4"
_DAMAGES = {
    "no zeros": ("gptq4", lambda t: _without(t, f"{_GATE}.qzeros"), "missing tensor"),
    "floats for codes": (
        "gptq4",
        lambda t: _changed(t, f"{_GATE}.qweight", torch.Tensor.float),
        "holds float32, config.json asks for int32",
    ),
    "a group too many": (
        "gptq4",
        lambda t: _changed(t, f"{_GATE}.g_idx", lambda g: _set(g, 2)),
        "not one of 2",
    ),
    "a negative group": (
        "gptq4",
        lambda t: _changed(t, f"{_GATE}.g_idx", lambda g: _set(g, -1)),
        "not one of 2",
    ),
    "uneven groups": (
        "gptq4",
        lambda t: _changed(t, f"{_GATE}.g_idx", lambda g: _set(g, 1)),
        "are not 32 each",
    ),
    "a tensor of no layer": (
        "gptq4",
        lambda t: {**t, "model.layers.9.mlp.gate_proj.qweight": torch.zeros(1).int()},
        "has no place",
    ),
    "a scale that is no number": (
        "w4a16",
        lambda t: _changed(t, f"{_GATE}.weight_scale", lambda s: _set(s, float("nan"))),
        "negative or not finite",
    ),
    "another shape": (
        "w4a16",
        lambda t: _changed(t, f"{_GATE}.weight_shape", lambda s: s * 2),
        "its weight_shape is",
    ),
    "a code that is no number": (
        "fp8_block",
        lambda t: _changed(t, f"{_GATE}.weight", lambda w: _set(w, float("nan"))),
        "a code is not a number",
    ),
    "no scales": (
        "fp8_block",
        lambda t: _without(t, f"{_GATE}.weight_scale_inv"),
        "missing tensor .*weight_scale'",
    ),
    "no JSON": (
        "nf4",
        lambda t: _changed(t, _NF4_STATE, lambda s: s * 0),
        "is not the JSON",
    ),
    "blocks of none": (
        "nf4",
        lambda t: _changed(t, _NF4_STATE, _state(blocksize=0)),
        "out of range",
    ),
    "other blocks": (
        "nf4",
        lambda t: _changed(t, _NF4_STATE, _state(blocksize=128)),
        "scales for blocks of 128",
    ),
    "the shape of another": (
        "nf4",
        lambda t: _changed(t, _NF4_STATE, _state(shape=[64, 64])),
        "tells of shape",
    ),
    "too few nested scales": (
        "nf4_nested",
        lambda t: _changed(t, _NF4_STATE, _state(nested_blocksize=256)),
        "scales of scales",
    ),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_codes_are_one_line_that_names_the_file(damage, tmp_path):
    written, change, told = _DAMAGES[damage]
    directory = _written(tmp_path, written)
    path = directory / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=told) as raised:
        paged_logits(directory)
    assert "\n" not in str(raised.value)
    assert str(directory) in str(raised.value)


def test_codes_without_a_config_that_tells_of_them_are_refused(tmp_path):
    directory = _written(tmp_path, "fp8_scalar")
    tiny_models.edit_config(directory, quantization_config=None)
    with pytest.raises(ModelLoadError, match=r"has no place|is not of 16-bit"):
        paged_logits(directory)


def test_a_quantised_checkpoint_is_not_rounded_again(tmp_path):
    with pytest.raises(ModelLoadError, match=r"quantised already .GPTQ, 4 bits.; leave"):
        paged_logits(_written(tmp_path), quantization="int8")
