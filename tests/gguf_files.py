"""GGUF files of Hugging Face models, written with the ``gguf`` package as llama.cpp converts them.

    write(path, tiny_models.build("llama"))

Names come from the package's own table, and the converter's changes to tensors are reimplemented
here from its description, so that nothing comes from the code under test. To write several files of
one model for measurements:

    python -m tests.gguf_files demo/model build/gguf --types Q8_0 Q4_0
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]

ARCHITECTURES = {
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
PERMUTED = {"llama", "mistral", "mixtral", "granite", "smollm3"}


def as_float32(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    return values, gguf.GGMLQuantizationType.F32


def as_type(kind: gguf.GGMLQuantizationType) -> Encode:
    """Convert matrices to a type that the package can quantise to, and vectors to float32."""

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if values.ndim < 2:
            return as_float32(name, values)
        return gguf.quantize(values, kind), kind

    return encode


def write(
    path: Path,
    model: Any,
    encode: Encode = as_float32,
    tokenizer: Path | None = None,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write ``model`` as one file, with the tokenizer and template of a directory if given."""
    name = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, name)
    _add_config(writer, model.config)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    for key, values in _tensors(model, name):
        data, kind = encode(key, values)
        writer.add_tensor(key, data, raw_dtype=kind)
    if change is not None:
        change(writer)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---------------------------------------------------------------- metadata


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    inner = getattr(config, "intermediate_size", None) or config.n_inner
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    kind = config.model_type
    if kind not in ("gpt2", "gpt_neox"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        names = ("layer_norm_epsilon", "layer_norm_eps")
        writer.add_layer_norm_eps(next(getattr(config, n) for n in names if hasattr(config, n)))
    if head_dim * heads != config.hidden_size or kind.startswith("gemma"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind != "gpt2":
        _add_rope(writer, config, head_dim)
    _add_own(writer, config)


def _add_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def _add_own(writer: gguf.GGUFWriter, config: Any) -> None:
    kind = config.model_type
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    elif kind in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    elif kind in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    elif kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    elif kind in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if kind == "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind in ("gemma2", "gemma3_text", "cohere2"):
        writer.add_sliding_window(config.sliding_window)
    elif kind == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str = "gpt-2") -> None:
    """Add a byte-level tokenizer with its template and its unmodified tokenizer.json."""
    source = (directory / "tokenizer.json").read_text()
    add_byte_level(writer, json.loads(source), pre)
    writer.add_string("tokenizer.huggingface.json", source)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    ids = {token["content"]: token["id"] for token in json.loads(source)["added_tokens"]}
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_pad_token_id(ids[config["pad_token"]])
    writer.add_add_bos_token(False)
    template = directory / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def add_byte_level(writer: gguf.GGUFWriter, source: dict[str, Any], pre: str) -> None:
    """Add the vocabulary of a tokenizer.json and its pre-tokenizer."""
    vocabulary = dict(source["model"]["vocab"])
    kinds = dict.fromkeys(vocabulary, gguf.TokenType.NORMAL)
    for token in source["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        own = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        kinds[token["content"]] = own
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = source["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[token] for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])


# ---------------------------------------------------------------- tensors


def _tensors(model: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for key, tensor in _taken_apart(model):
        if tied and key in ("lm_head.weight", "embed_out.weight"):
            continue
        told = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert told is not None, key
        yield told, _converted(config, key, tensor.detach().float()).numpy()
    factors = _rope_factors(config)
    yield from factors.items()


def _taken_apart(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors under the names in its checkpoints, with those of experts, and of the
    norms of heads, stacked."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        saved = load_file(Path(directory) / "model.safetensors")
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in saved.items():
        numbered = re.fullmatch(r"(.*\.experts|.*_layernorm\.norms)\.(\d+)\.(.*)", key)
        if numbered is None:
            yield key, tensor
            continue
        before, number, rest = numbered.groups()
        whole = f"{before.removesuffix('.norms')}.{rest}"
        stacks.setdefault(whole, {})[int(number)] = tensor
    for key, each in stacks.items():
        yield key, torch.stack([each[number] for number in range(len(each))])


def _converted(config: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as llama.cpp's converter writes it."""
    kind = config.model_type
    if kind in PERMUTED and ("q_proj" in key or "k_proj" in key):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    if kind.startswith("gemma") and key.endswith("norm.weight"):
        tensor = tensor + 1
    if kind == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        tensor = tensor.T
    if kind == "gpt_neox" and "query_key_value" in key:
        heads = config.num_attention_heads
        parts = tensor.reshape(heads, 3, -1, *tensor.shape[1:])
        tensor = torch.cat([parts[:, i].flatten(0, 1) for i in range(3)])
    return tensor.squeeze().contiguous()


def _rope_factors(config: Any) -> dict[str, np.ndarray]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        both = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {
            f"rope_factors_{name}.weight": np.array(values, dtype=np.float32)
            for name, values in both.items()
        }
    if rope.get("rope_type") != "llama3":
        return {}
    # Llama 3.1: the divisor of each frequency.
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        length = 2 * math.pi / frequency
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            share = rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]
            share /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - share) / rope["factor"] + share))
    return {"rope_freqs.weight": np.array(factors, dtype=np.float32)}


def main() -> int:
    """Write a model directory as one file for each type."""
    import transformers

    parser = argparse.ArgumentParser(description="Write a model as GGUF files.")
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--types", nargs="+", default=["BF16"])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
    for name in options.types:
        kind = gguf.GGMLQuantizationType[name]
        print(write(options.output / f"{name}.gguf", model, as_type(kind), options.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
