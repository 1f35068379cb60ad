"""Family readers: a Hugging Face config becomes a DecoderSpec, or is refused by name.

A reader asks for the keys its family has. What is left over and not known to be harmless is an
error: a key that is ignored today is a wrong answer tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.models.encoder.families import ENCODERS
from engine.models.encoder.spec import EncoderSpec
from engine.models.families import (
    deepseek,
    ernie,
    falcon,
    gemma,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    granite,
    hunyuan,
    hybrid,
    llama,
    llama4,
    mamba,
    moe,
    multimodal,
    nemotron_h,
    olmo,
    ungated,
)
from engine.models.families.multimodal import QWEN3_5_PLANES
from engine.models.heads import with_head
from engine.models.spec import DecoderSpec


class Family(NamedTuple):
    """What a Hugging Face model_type is read by, and what is known by it."""

    read: Callable[[ConfigReader], DecoderSpec]
    models: str
    differs: str  # from Llama
    names_code: bool = False  # published ones name code of their own, which Hugging Face's replaced


FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        moe.afmoe,
        "Trinity Nano, Mini and Large",
        "norms on both sides, QK norms, gated attention, windows, full layers without rope, "
        "experts by corrected sigmoids",
        names_code=True,
    ),
    "arcee": Family(ungated.arcee, "AFM-4.5B", "squared ReLU, no gate"),
    "bamba": Family(
        mamba.bamba,
        "Bamba 9B",
        "selective state spaces (Mamba-2) in most layers, rope on a part of the head",
    ),
    "cohere": Family(
        llama.cohere, "Command R", "layer norms, attention and MLP side by side, interleaved rope"
    ),
    "cohere2": Family(
        llama.cohere2, "Command R7B, Command A", "the same; windows, full layers without rope"
    ),
    "cwm": Family(llama.cwm, "Code World Model 32B", "windows in three layers of four"),
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
    "dots1": Family(moe.dots1, "dots.llm1", "QK norms, experts as DeepSeek-V3's", names_code=True),
    "ernie4_5": Family(ernie.ernie4_5, "ERNIE 4.5, dense", "interleaved rope", names_code=True),
    "ernie4_5_moe": Family(
        ernie.ernie4_5_moe,
        "ERNIE 4.5 21B-A3B and 300B-A47B",
        "interleaved rope, experts by corrected softmaxes, shared ones",
        names_code=True,
    ),
    "exaone4": Family(
        llama.exaone4,
        "EXAONE 4.0",
        "norms behind attention and MLP, QK norms; windows, full layers without rope",
    ),
    "exaone_moe": Family(
        moe.exaone_moe,
        "K-EXAONE 236B-A23B",
        "QK norms, windows, full layers without rope, experts as DeepSeek-V3's",
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
    "gemma3": Family(
        multimodal.gemma3, "Gemma 3 4B, 12B and 27B", "as `gemma3_text`; images are taken"
    ),
    "gemma3_text": Family(
        gemma.gemma3, "Gemma 3, text", "norms on both sides, windows with a rope of their own"
    ),
    "gemma4": Family(
        multimodal.gemma4,
        "Gemma 4 31B, 26B-A4B, E4B and E2B",
        "as `gemma4_text`; images are taken, sound is not",
    ),
    "gemma4_text": Family(
        gemma4.gemma4,
        "Gemma 4, text",
        "as `gemma3_text`; wider heads and fewer where all is seen, keys that are values there, "
        "norms of values; in some experts beside the MLP, or embeddings of each layer and keys "
        "that layers share",
    ),
    "gemma4_unified": Family(
        multimodal.gemma4_unified,
        "Gemma 4 12B",
        "as `gemma4_text`; images and sound are not taken",
    ),
    "gemma4_unified_text": Family(
        gemma4.gemma4_unified, "the same, its text model alone", "as `gemma4_text`"
    ),
    "glm": Family(glm.glm, "GLM-4 9B", "biases, interleaved rope on a part of the head"),
    "glm4": Family(glm.glm4, "GLM-4-0414, GLM-Z1", "the same; norms on both sides"),
    "glm4_moe": Family(
        glm.glm4_moe,
        "GLM-4.5 to 4.7 and their Air",
        "biases, rope on a part of the head, QK norms in some, experts as DeepSeek-V3's",
    ),
    "glm4_moe_lite": Family(
        deepseek.glm4_moe_lite, "GLM-4.7-Flash", "as `deepseek_v3`, without groups"
    ),
    "gpt2": Family(gpt.gpt2, "GPT-2", "learned positions, layer norms, no gate"),
    "gpt_bigcode": Family(
        gpt.gpt_bigcode, "StarCoder, SantaCoder", "as `gpt2`; one key and value for all heads"
    ),
    "gpt_neox": Family(
        gpt.gpt_neox, "GPT-NeoX, Pythia", "layer norms, rope on a part of the head, no gate"
    ),
    "gpt_oss": Family(
        gpt_oss.gpt_oss,
        "GPT-OSS 20B and 120B",
        "sinks, windows, biases, experts with a clamped SwiGLU",
    ),
    "granite": Family(granite.granite, "Granite 3 and 4, dense", "four multipliers"),
    "granite_swa": Family(
        granite.granite_swa,
        "Granite Swash, dense",
        "as `granite`; sinks, windows, a rope base of each layer's own",
    ),
    "granitemoe": Family(
        granite.granitemoe, "Granite 3 1B-A400M and 3B-A800M", "the same; experts"
    ),
    "granitemoe_swa": Family(
        granite.granitemoe_swa, "Granite Swash with experts", "as `granite_swa`; experts"
    ),
    "granitemoehybrid": Family(
        mamba.granitemoehybrid,
        "Granite 4.0 H, with experts and dense",
        "four multipliers; selective state spaces (Mamba-2) in nine layers of ten, no rope, "
        "experts and a shared one in some",
    ),
    "granitemoeshared": Family(
        granite.granitemoe, "Granite with a shared expert", "the same; one that all tokens go to"
    ),
    "helium": Family(llama.helium, "Helium 1", "interleaved rope"),
    "hunyuan_v1_dense": Family(
        hunyuan.hunyuan_dense, "Hunyuan 0.5B to 7B, Hunyuan-MT", "QK norms behind rope"
    ),
    "hunyuan_v1_moe": Family(
        hunyuan.hunyuan_moe,
        "Hunyuan-A13B",
        "QK norms behind rope, experts and a shared one",
        names_code=True,
    ),
    "hy_v3": Family(moe.hy_v3, "Hy3", "QK norms, experts by corrected sigmoids and shared ones"),
    "hyperclovax": Family(
        granite.hyperclovax,
        "HyperCLOVA X SEED Think",
        "as `granite`; norms on both sides",
        names_code=True,
    ),
    "internlm3": Family(llama.internlm3, "InternLM3", "biases in some", names_code=True),
    "iquestcoder": Family(llama.iquestcoder, "IQuest-Coder V1", "", names_code=True),
    "jais2": Family(ungated.jais2, "Jais 2", "layer norms, biases, squared ReLU, no gate"),
    "lfm2": Family(hybrid.lfm2, "LFM2 350M to 2.6B", "gated short convolutions, QK norms"),
    "lfm2_moe": Family(
        hybrid.lfm2_moe, "LFM2-8B-A1B, 24B-A2B", "the same; experts by corrected sigmoids"
    ),
    "lfm3": Family(
        hybrid.lfm3,
        "LFM3 1.7B",
        "as `lfm2`; norms on both sides, gated heads, windows with a rope of their own",
    ),
    "llama": Family(llama.llama, "Llama 2 and 3.x, SmolLM 1 and 2, Yi, many more", ""),
    "llama4": Family(
        multimodal.llama_4, "Llama 4 Scout and Maverick", "as `llama4_text`; images are not taken"
    ),
    "llama4_text": Family(
        llama4.llama4_text,
        "Llama 4, its text model alone",
        "chunked attention, layers without rope, unit QK norms, experts weighed before they read",
    ),
    "llava": Family(
        multimodal.llava,
        "LLaVA 1.5, LLaVA-Interleave, Pixtral 12B",
        "as `llama`, `mistral` or `qwen2`; images are taken",
    ),
    "mellum": Family(
        moe.mellum, "Mellum 2 12B-A2.5B", "as `qwen3_moe`; windows with a rope of their own"
    ),
    "minimax_m2": Family(
        moe.minimax_m2,
        "MiniMax-M2 to M2.5",
        "wide QK norms, rope on a part of the head, experts by corrected sigmoids",
        names_code=True,
    ),
    "ministral": Family(llama.ministral, "Ministral 8B", "windows"),
    "ministral3": Family(
        llama.ministral3, "Ministral 3, its text model alone", "queries that grow with position"
    ),
    "mistral": Family(llama.mistral, "Mistral, Ministral", "windows in some"),
    "mistral3": Family(
        multimodal.mistral3,
        "Mistral Small 3.1, 3.2 and 4, Ministral 3",
        "as `mistral`, `ministral3` or `mistral4`; images are taken",
    ),
    "mistral4": Family(
        deepseek.mistral4,
        "Mistral Small 4, its text model alone",
        "latent attention, queries that grow with position, routed and shared experts",
    ),
    "mixtral": Family(moe.mixtral, "Mixtral", "experts"),
    "nemotron": Family(
        ungated.nemotron,
        "Nemotron-4, Minitron",
        "layer norms, rope on a part of the head, squared ReLU, no gate",
    ),
    "nemotron_h": Family(
        nemotron_h.nemotron_h,
        "Nemotron-H 8B to 56B, Nemotron Nano 2 9B and 12B, Nemotron 3 Nano and Super",
        "selective state spaces (Mamba-2), attention without rope and MLPs as layers of their own, "
        "squared ReLU, no gate; experts as DeepSeek-V3's in some, of latents in Super",
        names_code=True,
    ),
    "olmo2": Family(olmo.olmo2, "OLMo 2", "norms behind attention and MLP, wide QK norms"),
    "olmo3": Family(olmo.olmo3, "OLMo 3", "the same; windows with a rope of their own"),
    "olmo_hybrid": Family(
        hybrid.olmo_hybrid,
        "OLMo Hybrid 7B",
        "gated delta rules in three layers of four, norms behind attention alone",
    ),
    "olmoe": Family(olmo.olmoe, "OLMoE", "wide QK norms, experts"),
    "opt": Family(
        gpt.opt, "OPT, but for 350M", "learned positions, layer norms, biases, ReLU, no gate"
    ),
    "phi3": Family(
        llama.phi3,
        "Phi-3, Phi-3.5, Phi-4",
        "windows, LongRoPE, partial rope in some",
        names_code=True,
    ),
    "qwen2": Family(llama.qwen2, "Qwen2, Qwen2.5", "biases, windows in some"),
    "qwen2_5_vl": Family(multimodal.qwen_vl, "Qwen2.5-VL", "as `qwen2`; images are taken"),
    "qwen2_moe": Family(
        moe.qwen2_moe, "Qwen1.5-MoE, Qwen2-57B-A14B", "biases, experts and a gated shared one"
    ),
    "qwen2_vl": Family(multimodal.qwen_vl, "Qwen2-VL", "as `qwen2`; images are taken"),
    "qwen3": Family(llama.qwen3, "Qwen3, dense", "QK norms"),
    "qwen3_5": Family(multimodal.qwen3_5, "Qwen3.5, dense", "as `qwen3_5_text`; images are taken"),
    "qwen3_5_moe": Family(
        multimodal.qwen3_5_moe,
        "Qwen3.5 35B-A3B and larger",
        "as `qwen3_5_moe_text`; images are taken",
    ),
    "qwen3_5_moe_text": Family(
        partial(hybrid.qwen3_5_moe, rope_planes=QWEN3_5_PLANES),
        "Qwen3.5 with experts, its text model alone",
        "as `qwen3_5_text`; experts and a gated shared one",
    ),
    "qwen3_5_text": Family(
        partial(hybrid.qwen3_5, rope_planes=QWEN3_5_PLANES),
        "Qwen3.5, its text model alone",
        "gated delta rules in three layers of four, gated attention, QK norms, rope on a part of "
        "the head",
    ),
    "qwen3_moe": Family(moe.qwen3_moe, "Qwen3-30B-A3B, Qwen3-235B-A22B", "QK norms, experts"),
    "qwen3_next": Family(
        hybrid.qwen3_next, "Qwen3-Next", "as `qwen3_5_text`; experts and a gated shared one"
    ),
    "qwen3_vl": Family(multimodal.qwen3_vl, "Qwen3-VL, dense", "as `qwen3`; images are taken"),
    "qwen3_vl_moe": Family(
        multimodal.qwen3_vl_moe,
        "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
        "as `qwen3_moe`; images are taken",
    ),
    "seed_oss": Family(llama.seed_oss, "Seed-OSS", "biases"),
    "smollm3": Family(llama.smollm3, "SmolLM3", "every fourth layer without rope"),
    "solar_open": Family(glm.solar_open, "Solar Open", "as `glm4_moe`, rope on the whole head"),
    "stablelm": Family(llama.stablelm, "StableLM", "layer norms, rope on a part of the head"),
    "starcoder2": Family(
        ungated.starcoder2, "StarCoder2", "layer norms, biases, no gate, windows in some"
    ),
    "vaultgemma": Family(gemma.vaultgemma, "VaultGemma 1B", "as `gemma2`; norms on one side"),
    "youtu": Family(deepseek.youtu, "Youtu-LLM 2B", "latent attention"),
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
