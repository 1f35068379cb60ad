"""Converts a model directory to one GGUF file, the format that llama.cpp loads.

The format (version 3): a header, metadata as typed keys and values, a table of tensors, then their
data, each aligned to 32 bytes. Quantised tensors are rows of blocks of 32 weights, each with a
float16 scale d: Q8_0 holds 32 signed bytes, Q4_0 32 values of 4 bits, read as d * (q - 8).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 32
_BLOCK = 32  # weights that share a scale
_F32, _Q4_0, _Q8_0, _BF16 = 0, 2, 8, 30  # numbers of tensor types
WEIGHT_TYPES = {"bf16": _BF16, "q8_0": _Q8_0, "q4_0": _Q4_0}
_TOKEN_NORMAL, _TOKEN_CONTROL, _TOKEN_ADDED = 1, 3, 4

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}

Floats = npt.NDArray[np.float32]
Tensor = tuple[str, tuple[int, ...], int, bytes]  # name, shape, type, data


def ensure_gguf(model: Path, kind: str) -> Path:
    """Write ``model`` (Llama or Qwen2, tied embeddings, bfloat16) as GGUF beside its weights.

    Args:
        model: a directory in Hugging Face format.
        kind: the type of all matrices, one of :data:`WEIGHT_TYPES`; vectors stay float32.
    """
    path = model / f"model-{kind}.gguf"
    if path.exists():
        return path
    config = json.loads((model / "config.json").read_text())
    metadata = [*_metadata(config), *_tokenizer_metadata(model)]
    tensors = list(_tensors(model, config, WEIGHT_TYPES[kind]))
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        _write(file, metadata, tensors)
    partial.rename(path)
    return path


def _metadata(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    family = config["model_type"]
    rope = config.get("rope_parameters") or {}
    yield "general.architecture", family
    yield f"{family}.block_count", config["num_hidden_layers"]
    yield f"{family}.context_length", config["max_position_embeddings"]
    yield f"{family}.embedding_length", config["hidden_size"]
    yield f"{family}.feed_forward_length", config["intermediate_size"]
    yield f"{family}.attention.head_count", config["num_attention_heads"]
    yield f"{family}.attention.head_count_kv", config["num_key_value_heads"]
    yield f"{family}.attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"])
    yield f"{family}.rope.freq_base", float(rope.get("rope_theta", 10_000.0))


def _tokenizer_metadata(model: Path) -> Iterator[tuple[str, Any]]:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = dict(tokenizer["model"]["vocab"])
    kinds = dict.fromkeys(vocabulary, _TOKEN_NORMAL)
    for token in tokenizer["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        kinds[token["content"]] = _TOKEN_CONTROL if token["special"] else _TOKEN_ADDED
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = tokenizer["model"]["merges"]
    yield "tokenizer.ggml.model", "gpt2"
    yield "tokenizer.ggml.pre", "gpt-2"
    yield "tokenizer.ggml.tokens", tokens
    yield "tokenizer.ggml.token_type", [kinds[token] for token in tokens]
    yield "tokenizer.ggml.merges", [m if isinstance(m, str) else " ".join(m) for m in merges]
    yield "tokenizer.ggml.eos_token_id", 2
    yield "tokenizer.ggml.add_bos_token", False


def _tensors(model: Path, config: dict[str, Any], kind: int) -> Iterator[Tensor]:
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        values: Floats = weight.float().numpy()
        outer, suffix = name.rsplit(".", 1)
        if name.startswith("model.layers."):
            _, _, layer, inner = outer.split(".", 3)
            told = f"blk.{layer}.{_LAYER_NAMES[inner]}.{suffix}"
            if config["model_type"] == "llama":
                values = _interleave_rope(values, inner, config)
        elif outer == "lm_head":
            continue  # tied
        else:
            told = f"{_OUTER_NAMES[outer]}.{suffix}"
        used = kind if values.ndim == 2 else _F32
        yield told, values.shape, used, _encode(values, used)


def _interleave_rope(values: Floats, inner: str, config: dict[str, Any]) -> Floats:
    """Reorder the query and key rows of a Llama from Hugging Face's RoPE layout to llama.cpp's.

    llama.cpp rotates neighbouring rows of a head by one angle, Hugging Face rows i and i + head_dim
    / 2.
    """
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }.get(inner)
    if heads is None:
        return values
    halves = values.reshape(heads, 2, -1, values.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _encode(values: Floats, kind: int) -> bytes:
    if kind == _F32:
        return values.tobytes()
    if kind == _BF16:  # the upper half of a float32; exact, since the weights are bfloat16
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    blocks = values.reshape(-1, _BLOCK)
    if kind == _Q8_0:
        scales = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
        codes = np.rint(blocks * _inverse(scales)).astype(np.int8).view(np.uint8)
    else:
        # The value furthest from zero becomes -8, the only code without a positive counterpart.
        furthest: Floats = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
        scales = -furthest / np.float32(8)
        quads = np.clip(np.rint(blocks * _inverse(scales)) + 8, 0, 15).astype(np.uint8)
        codes = quads[:, : _BLOCK // 2] | quads[:, _BLOCK // 2 :] << 4
    return np.concatenate([scales.astype(np.float16).view(np.uint8), codes], axis=1).tobytes()


def _inverse(scales: Floats) -> Floats:
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)


# ---------------------------------------------------------------- bytes


def _write(file: BinaryIO, metadata: list[tuple[str, Any]], tensors: list[Tensor]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata:
        file.write(_string(key) + _typed(value))
    offset = 0
    for name, shape, kind, data in tensors:
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))  # the fastest dimension first
        file.write(_string(name) + struct.pack("<I", len(shape)) + sizes)
        file.write(struct.pack("<IQ", kind, offset))
        offset += len(data) + -len(data) % _ALIGNMENT
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    for *_, data in tensors:
        file.write(data + b"\0" * (-len(data) % _ALIGNMENT))


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            head = struct.pack("<IIQ", 9, 8, len(value))
            return head + b"".join(_string(text) for text in value)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(f"no GGUF type for {value!r}")
