"""Family readers: a Hugging Face config becomes a DecoderSpec, or is refused by name.

A reader asks for the keys its family has. What is left over and not known to be harmless is an
error: a key that is ignored today is a wrong answer tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.models.encoder.families import ENCODERS
from engine.models.encoder.spec import EncoderSpec
from engine.models.families import deepseek, falcon, gemma, gpt, gpt_oss, llama, llama4, moe
from engine.models.heads import with_head
from engine.models.spec import DecoderSpec


class Family(NamedTuple):
    """What a Hugging Face model_type is read by, and what is known by it."""

    read: Callable[[ConfigReader], DecoderSpec]
    models: str
    differs: str  # from Llama
    names_code: bool = False  # published ones name code of their own, which Hugging Face's replaced


FAMILIES: dict[str, Family] = {
    "cohere": Family(
        llama.cohere, "Command R", "layer norms, attention and MLP side by side, interleaved rope"
    ),
    "cohere2": Family(
        llama.cohere2, "Command R7B, Command A", "the same; windows, full layers without rope"
    ),
    "deepseek_v2": Family(
        deepseek.deepseek_v2,
        "DeepSeek-V2, V2-Lite",
        "latent attention, routed and shared experts",
        names_code=True,
    ),
    "deepseek_v3": Family(
        deepseek.deepseek_v3,
        "DeepSeek-V3, R1",
        "the same; experts in groups, by corrected sigmoids",
        names_code=True,
    ),
    "falcon": Family(
        falcon.falcon,
        "Falcon 7B, 11B, 40B, 180B; not those with ALiBi",
        "layer norms, attention and MLP side by side, no gate",
        names_code=True,
    ),
    "gemma": Family(gemma.gemma, "Gemma 1", "scaled embeddings, GELU"),
    "gemma2": Family(
        gemma.gemma2, "Gemma 2", "norms on both sides, windows, scores and logits capped"
    ),
    "gemma3_text": Family(
        gemma.gemma3, "Gemma 3, text", "norms on both sides, windows with a rope of their own"
    ),
    "gpt2": Family(gpt.gpt2, "GPT-2", "learned positions, layer norms, no gate"),
    "gpt_neox": Family(
        gpt.gpt_neox, "GPT-NeoX, Pythia", "layer norms, rope on a part of the head, no gate"
    ),
    "gpt_oss": Family(
        gpt_oss.gpt_oss,
        "GPT-OSS 20B and 120B",
        "sinks, windows, biases, experts with a clamped SwiGLU",
    ),
    "granite": Family(llama.granite, "Granite 3, dense", "four multipliers"),
    "llama": Family(llama.llama, "Llama 2 and 3.x, SmolLM 1 and 2, Yi, many more", ""),
    "llama4": Family(
        llama4.llama4, "Llama 4 Scout and Maverick", "as `llama4_text`; images are not taken"
    ),
    "llama4_text": Family(
        llama4.llama4_text,
        "Llama 4, its text model alone",
        "chunked attention, layers without rope, unit QK norms, experts weighed before they read",
    ),
    "mistral": Family(llama.mistral, "Mistral, Ministral", "windows in some"),
    "mixtral": Family(moe.mixtral, "Mixtral", "experts"),
    "olmo2": Family(llama.olmo2, "OLMo 2", "norms behind attention and MLP, wide QK norms"),
    "phi3": Family(
        llama.phi3,
        "Phi-3, Phi-3.5, Phi-4",
        "windows, LongRoPE, partial rope in some",
        names_code=True,
    ),
    "qwen2": Family(llama.qwen2, "Qwen2, Qwen2.5", "biases, windows in some"),
    "qwen2_moe": Family(
        moe.qwen2_moe, "Qwen1.5-MoE, Qwen2-57B-A14B", "biases, experts and a gated shared one"
    ),
    "qwen3": Family(llama.qwen3, "Qwen3, dense", "QK norms"),
    "qwen3_moe": Family(moe.qwen3_moe, "Qwen3-30B-A3B, Qwen3-235B-A22B", "QK norms, experts"),
    "smollm3": Family(llama.smollm3, "SmolLM3", "every fourth layer without rope"),
    "stablelm": Family(llama.stablelm, "StableLM", "layer norms, rope on a part of the head"),
}


def read_spec(config: dict[str, Any]) -> DecoderSpec | EncoderSpec:
    """The spec of a model from its parsed config.json.

    Raises:
        ModelLoadError: the architecture is not known, a value is out of range, or a key is not
            understood; one line that names it.
    """
    reader = ConfigReader(config)
    model_type = reader.text("model_type", "")
    family, encoder = FAMILIES.get(model_type), ENCODERS.get(model_type)
    if family is not None and family.names_code:
        reader.ignore("auto_map")
    else:
        reader.refuse("auto_map", "asks for code from the model's directory, which is never run")
    if encoder is not None:
        reader.refuse("quantization_config", "is set: encoders are supported unquantised only")
        spec = encoder.read(reader)
        reader.finish()
        return spec
    if family is None:
        known = ", ".join(sorted({*FAMILIES, *ENCODERS}))
        raise ModelLoadError(
            f"config.json: architecture {model_type[:80]!r} is not supported (known: {known})"
        )
    reader.section("quantization_config")  # read by itself: engine/quantization/formats
    spec = with_head(family.read(reader), reader)
    reader.finish()
    return spec
