"""Convert a file's metadata to its model's config.json, with a table for each architecture.

The family readers of ``engine/models/families`` check the result like any config. The keys are
those of ggml's ``docs/gguf.md`` and of llama.cpp's converter, which also defines how values are
converted; an architecture's key that is not used here is refused by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ModelLoadError
from engine.gguf.file import GgufFile, GgufTensor
from engine.models.config_reader import ConfigReader
from engine.pooling import PoolingKind

# Keys that duplicate others, that the runtime decides, or that ``pooling_kind`` reads.
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type")
_COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_MAX_FACTORS = 4096
# llama.cpp's numbers. Those for its own default and for vectors of all tokens say nothing.
_POOLING: dict[int, PoolingKind | None] = {-1: None, 0: None, 1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores the models of a Hugging Face model_type."""

    model_type: str
    norm: Mapping[str, str]  # metadata key of the norms' epsilon
    keys: Mapping[str, str] = field(default_factory=dict[str, str])  # of numbers
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    optional: Mapping[str, str] = field(default_factory=dict[str, str])  # 0 means absent
    by_tensor: Mapping[str, str] = field(default_factory=dict[str, str])  # flags: a tensor is there
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    common: Mapping[str, str] = field(default_factory=lambda: _COMMON)
    derive: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    has_rope: bool = True
    rope_interleaved: bool = False  # query and key rows are in adjacent rotary pairs
    norms_include_offset: bool = False  # norms are stored as applied, not less one


def _gemma_scale(larger: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the attention scale, which files lack.

    Like llama.cpp, this recognises by its number of layers the one model whose scale is not that of
    the head width.
    """

    def derive(config: dict[str, Any]) -> dict[str, Any]:
        if config["num_hidden_layers"] == larger:
            return {"query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"]}
        return {"query_pre_attn_scalar": config["head_dim"]}

    return derive


_LLAMA = Architecture("llama", _RMS, rope_interleaved=True)
_MIXTRAL = Architecture(
    "mixtral",
    _RMS,
    keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    rope_interleaved=True,
)
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2", _RMS),
    "qwen3": Architecture("qwen3", _RMS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _RMS,
        keys={
            **_QWEN_EXPERTS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture("qwen3_moe", _RMS, keys=_QWEN_EXPERTS, fixed={"norm_topk_prob": True}),
    "gemma": Architecture("gemma", _RMS, norms_include_offset=True),
    "gemma2": Architecture(
        "gemma2",
        _RMS,
        keys=_WINDOW,
        optional=_SOFTCAPS,
        derive=_gemma_scale(46),
        norms_include_offset=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _RMS,
        keys=_WINDOW,
        optional={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        derive=_gemma_scale(62),
        norms_include_offset=True,
    ),
    "phi3": Architecture("phi3", _RMS, optional=_WINDOW),
    "granite": Architecture(
        "granite",
        _RMS,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        rope_interleaved=True,
    ),
    "olmo2": Architecture("olmo2", _RMS),
    "smollm3": Architecture("smollm3", _RMS, rope_interleaved=True),
    "stablelm": Architecture(
        "stablelm",
        _LAYER_NORM,
        flags={"use_parallel_residual": "use_parallel_residual"},
        by_tensor={"blk.0.attn_q_norm.weight": "qk_layernorm"},
    ),
    "command-r": Architecture(
        "cohere",
        _LAYER_NORM,
        keys={"logit_scale": "logit_scale"},
        by_tensor={"blk.0.attn_q_norm.weight": "use_qk_norm"},
    ),
    "cohere2": Architecture("cohere2", _LAYER_NORM, keys={**_WINDOW, "logit_scale": "logit_scale"}),
    "gptneox": Architecture(
        "gpt_neox", _LAYER_NORM, flags={"use_parallel_residual": "use_parallel_residual"}
    ),
    "gpt2": Architecture(
        "gpt2",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        common={
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
        },
        has_rope=False,
    ),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file. Raises ModelLoadError for an unknown one."""
    kind = file.text("general.type", "model")
    if kind != "model":
        raise ModelLoadError(f"{file.path}: holds a {kind[:40]!r}, not a model")
    name = file.architecture
    known = ARCHITECTURES.get(name)
    if known is None:
        names = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(
            f"{file.path}: architecture {name[:80]!r} is not supported in GGUF (known: {names})"
        )
    experts = file.metadata.get("llama.expert_count", 0)
    return _MIXTRAL if known is _LLAMA and experts else known


def pooling_kind(file: GgufFile) -> PoolingKind | None:
    """Return the hidden states that an embedding model takes; None: not specified.

    Raises:
        ModelLoadError: it takes them in another way, as rerankers do.
    """
    key = f"{file.architecture}.pooling_type"
    number = file.metadata.get(key, 0)
    if type(number) is not int or number not in _POOLING:
        known = ", ".join(f"{place} ({kind})" for place, kind in _POOLING.items() if kind)
        raise ModelLoadError(f"{file.path}: '{key}' is {number!r:.40}; known: {known}")
    return _POOLING[number]


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the keys of config.json, as the family's reader expects them.

    Raises:
        ModelLoadError: the architecture is unknown, or a value is missing, out of range or not
            understood; one line that names the file and the key.
    """
    known, name = architecture_of(file), file.architecture
    metadata = {key: value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    reader = ConfigReader(metadata, str(file.path))
    prefix = f"{name}."
    config: dict[str, Any] = {"model_type": known.model_type, "vocab_size": _vocab_size(file)}
    for key, ours in known.common.items():
        config[ours] = reader.count(prefix + key)
    for key, ours in (*known.norm.items(), *known.keys.items()):
        config[ours] = _number(reader, prefix + key)
    for key, ours in known.flags.items():
        config[ours] = reader.flag(prefix + key)
    for key, ours in known.optional.items():
        if metadata.get(prefix + key):
            config[ours] = _number(reader, prefix + key)
        reader.ignore(prefix + key)
    config |= {ours: True for name, ours in known.by_tensor.items() if name in file.tensors}
    config |= known.fixed
    if known.has_rope:
        _read_heads(reader, prefix, config)
        config |= _rope(file, reader, prefix, config)
    else:
        reader.ignore(prefix + "attention.head_count_kv")
    if known.derive is not None:
        config |= known.derive(config)
    for key in _HARMLESS:
        reader.ignore(prefix + key)
    reader.require(prefix + "attention.causal", True)
    for key in ("expert_count", "expert_used_count"):
        if not metadata.get(prefix + key):
            reader.ignore(prefix + key)  # zero in dense models of families with experts
    reader.finish()
    return config


def _read_heads(reader: ConfigReader, prefix: str, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = reader.count(prefix + "attention.head_count_kv", heads)
    default = max(1, config["hidden_size"] // heads)
    head_dim = reader.count(prefix + "attention.key_length", default)
    reader.require(prefix + "attention.value_length", head_dim)
    config["head_dim"] = head_dim


def _rope(
    file: GgufFile, reader: ConfigReader, prefix: str, config: dict[str, Any]
) -> dict[str, Any]:
    """Return the config keys about rotary positions."""
    found: dict[str, Any] = {"rope_theta": reader.number(prefix + "rope.freq_base", 10_000.0)}
    num_dims = reader.count(prefix + "rope.dimension_count", config["head_dim"])
    if num_dims != config["head_dim"]:
        found["partial_rotary_factor"] = num_dims / config["head_dim"]
    scaling = _scaling(reader, prefix + "rope.scaling.")
    # Factors for each frequency are tensors: Llama 3.1's, and LongRoPE's.
    plain = _factors(file, "rope_freqs.weight")
    short, long = (_factors(file, f"rope_factors_{name}.weight") for name in ("short", "long"))
    if plain or short or long:
        scaling = {
            "attention_factor": 1.0,
            **scaling,
            "rope_type": "longrope",
            "short_factor": plain or short,
            "long_factor": plain or long,
        }
    if scaling:
        found["rope_scaling"] = scaling
    return found


def _scaling(reader: ConfigReader, prefix: str) -> dict[str, Any]:
    kind = reader.text(prefix + "type", "none")
    original = reader.optional_count(prefix + "original_context_length")
    attention = reader.optional_number(prefix + "attn_factor")
    found: dict[str, Any] = {}
    if original is not None:
        found["original_max_position_embeddings"] = original
    if kind in ("none", "longrope"):
        reader.ignore(prefix + "factor")
        return found if attention is None else {**found, "attention_factor": attention}
    if kind not in ("linear", "yarn"):
        raise reader.error(prefix + "type", f"is {kind[:40]!r}; known: linear, longrope, yarn")
    factor = reader.number(prefix + "factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    reader.require(prefix + "yarn_ext_factor", 1.0)
    found |= {"rope_type": "yarn", "factor": factor}
    if attention is not None:  # times YaRN's own
        found["attention_factor"] = attention * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    for key in ("beta_fast", "beta_slow"):
        if f"{prefix}yarn_{key}" in reader:
            found[key] = reader.number(f"{prefix}yarn_{key}")
    return found


def _factors(file: GgufFile, name: str) -> list[float] | None:
    """Return the numbers of a small float32 tensor; None if the file lacks it."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise ModelLoadError(f"{tensor.path}: '{name}' must be a list of float32")
    return list(struct.unpack(f"<{tensor.shape[0]}f", _bytes_of(tensor)))


def _bytes_of(tensor: GgufTensor) -> bytes:
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        data = file.read(tensor.num_bytes)
    if len(data) != tensor.num_bytes:
        raise ModelLoadError(f"{tensor.path}: '{tensor.name}' is cut short")
    return data


def _vocab_size(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelLoadError(f"{file.path}: has no table of embeddings (token_embd.weight)")
    return table.shape[0]


def _number(reader: ConfigReader, key: str) -> float | int:
    """Return a number; counts stay integers, because config readers check types."""
    value = reader.number(key)
    return int(value) if value.is_integer() and not key.endswith(("scale", "epsilon")) else value
