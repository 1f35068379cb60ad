"""Family readers: a Hugging Face config becomes a DecoderSpec, or is refused by name.

A reader reads the keys that its family has. Any other key that is not known to be harmless is an
error: a key that is ignored today is a wrong answer tomorrow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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
    kimi_linear,
    llama,
    llama4,
    mamba,
    mamba1,
    mamba2,
    mimo,
    moe,
    multimodal,
    nemotron_h,
    olmo,
    phi,
    ungated,
)
from engine.models.families.audio_text import AUDIO_TEXT
from engine.models.families.family import Family
from engine.models.families.image_text import IMAGE_TEXT
from engine.models.families.multimodal import QWEN3_5_MROPE
from engine.models.output_head import with_head
from engine.models.spec import DecoderSpec

FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        moe.afmoe,
        "Trinity Nano, Mini and Large",
        "norms before and after, QK norms, gated attention, windows, no rope in full-attention "
        "layers, experts by corrected sigmoids",
        has_remote_code=True,
    ),
    "apertus": Family(ungated.apertus, "Apertus 8B and 70B", "ungated MLP with xIELU, QK norms"),
    "arcee": Family(ungated.arcee, "AFM-4.5B", "ungated MLP with squared ReLU"),
    "bamba": Family(
        mamba.bamba,
        "Bamba 9B",
        "selective state spaces (Mamba-2) in most layers, partial rope",
    ),
    "codegen": Family(gpt.codegen, "CodeGen 350M to 16B; not CodeGen2", "as `gptj`"),
    "cohere": Family(
        llama.cohere, "Command R", "layer norms, parallel attention and MLP, interleaved rope"
    ),
    "cohere2": Family(
        llama.cohere2,
        "Command R7B, Command A",
        "the same; windows, no rope in full-attention layers",
    ),
    "cwm": Family(llama.cwm, "Code World Model 32B", "windows in three layers of four"),
    "deepseek_v2": Family(
        deepseek.deepseek_v2,
        "DeepSeek-V2, V2-Lite",
        "latent attention, routed and shared experts",
        has_remote_code=True,
    ),
    "deepseek_v3": Family(
        deepseek.deepseek_v3,
        "DeepSeek-V3, R1",
        "the same; experts in groups, by corrected sigmoids",
        has_remote_code=True,
    ),
    "deepseek_v32": Family(
        deepseek.deepseek_v32,
        "DeepSeek-V3.2",
        "as `deepseek_v3`; attention to positions that an indexer selects",
    ),
    "dots1": Family(
        moe.dots1, "dots.llm1", "QK norms, experts as in DeepSeek-V3", has_remote_code=True
    ),
    "ernie4_5": Family(
        ernie.ernie4_5, "ERNIE 4.5, dense", "interleaved rope", has_remote_code=True
    ),
    "ernie4_5_moe": Family(
        ernie.ernie4_5_moe,
        "ERNIE 4.5 21B-A3B and 300B-A47B",
        "interleaved rope, experts by corrected softmaxes, shared experts",
        has_remote_code=True,
    ),
    "exaone4": Family(
        llama.exaone4,
        "EXAONE 4.0",
        "norms after attention and MLP, QK norms; windows, no rope in full-attention layers",
    ),
    "exaone_moe": Family(
        moe.exaone_moe,
        "K-EXAONE 236B-A23B",
        "QK norms, windows, no rope in full-attention layers, experts as in DeepSeek-V3",
    ),
    "falcon": Family(
        falcon.falcon,
        "Falcon 7B, 11B, 40B, 180B; not those with ALiBi",
        "layer norms, parallel attention and ungated MLP",
        has_remote_code=True,
    ),
    "falcon_h1": Family(
        mamba.falcon_h1,
        "Falcon-H1 0.5B to 34B",
        "attention beside a selective state space (Mamba-2) in each layer, many multipliers",
    ),
    "falcon_mamba": Family(mamba1.falcon_mamba, "Falcon-Mamba 7B", "as `mamba`; more norms"),
    "flex_olmo": Family(olmo.flex_olmo, "FlexOlmo 7x7B", "as `olmo2`; experts"),
    "gemma": Family(gemma.gemma, "Gemma 1", "scaled embeddings, GELU"),
    "gemma2": Family(
        gemma.gemma2, "Gemma 2", "norms before and after, windows, capped scores and logits"
    ),
    "gemma3": Family(
        multimodal.gemma3, "Gemma 3 4B, 12B and 27B", "as `gemma3_text`; accepts images"
    ),
    "gemma3_text": Family(
        gemma.gemma3, "Gemma 3, text", "norms before and after, windows with their own rope"
    ),
    "gemma4": Family(
        multimodal.gemma4,
        "Gemma 4 31B, 26B-A4B, E4B and E2B",
        "as `gemma4_text`; accepts images, not audio",
    ),
    "gemma4_text": Family(
        gemma4.gemma4,
        "Gemma 4, text",
        "as `gemma3_text`; fewer and wider heads in full-attention layers, whose keys are also "
        "their values, value norms; in some sizes experts beside the MLP, or per-layer embeddings "
        "and keys shared between layers",
    ),
    "gemma4_unified": Family(
        multimodal.gemma4_unified,
        "Gemma 4 12B",
        "as `gemma4_text`; text only",
    ),
    "gemma4_unified_text": Family(
        gemma4.gemma4_unified, "the same, text model only", "as `gemma4_text`"
    ),
    "glm": Family(glm.glm, "GLM-4 9B", "biases, interleaved partial rope"),
    "glm4": Family(glm.glm4, "GLM-4-0414, GLM-Z1", "the same; norms before and after"),
    "glm4_moe": Family(
        glm.glm4_moe,
        "GLM-4.5 to 4.7 and their Air",
        "biases, partial rope, QK norms in some, experts as in DeepSeek-V3",
    ),
    "glm4_moe_lite": Family(
        deepseek.glm4_moe_lite, "GLM-4.7-Flash", "as `deepseek_v3`, without groups"
    ),
    "glm_moe_dsa": Family(
        deepseek.glm_moe_dsa,
        "GLM-5, 5.1",
        "as `deepseek_v32`, without groups; layers may share a selection",
    ),
    "gpt2": Family(gpt.gpt2, "GPT-2", "learned positions, layer norms, ungated MLP"),
    "gpt_bigcode": Family(
        gpt.gpt_bigcode, "StarCoder, SantaCoder", "as `gpt2`; multi-query attention"
    ),
    "gpt_neo": Family(
        gpt.gpt_neo,
        "GPT-Neo 125M to 2.7B",
        "learned positions, layer norms, ungated MLP, windows in every other layer",
    ),
    "gpt_neox": Family(gpt.gpt_neox, "GPT-NeoX, Pythia", "layer norms, partial rope, ungated MLP"),
    "gpt_oss": Family(
        gpt_oss.gpt_oss,
        "GPT-OSS 20B and 120B",
        "sinks, windows, biases, experts with a clamped SwiGLU",
    ),
    "gptj": Family(
        gpt.gptj,
        "GPT-J 6B",
        "layer norms, parallel attention and ungated MLP, interleaved partial rope",
    ),
    "granite": Family(granite.granite, "Granite 3 and 4, dense", "four multipliers"),
    "granite_swa": Family(
        granite.granite_swa,
        "Granite Swash, dense",
        "as `granite`; sinks, windows, a rope base per layer",
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
        "experts in some",
    ),
    "granitemoeshared": Family(
        granite.granitemoe, "Granite with a shared expert", "the same; a shared expert"
    ),
    "helium": Family(llama.helium, "Helium 1", "interleaved rope"),
    "hunyuan_v1_dense": Family(
        hunyuan.hunyuan_dense, "Hunyuan 0.5B to 7B, Hunyuan-MT", "QK norms after rope"
    ),
    "hunyuan_v1_moe": Family(
        hunyuan.hunyuan_moe,
        "Hunyuan-A13B",
        "QK norms after rope, experts and a shared expert",
        has_remote_code=True,
    ),
    "hy_v3": Family(moe.hy_v3, "Hy3", "QK norms, experts by corrected sigmoids, shared experts"),
    "hyperclovax": Family(
        granite.hyperclovax,
        "HyperCLOVA X SEED Think",
        "as `granite`; norms before and after",
        has_remote_code=True,
    ),
    "idefics3": Family(
        multimodal.idefics3,
        "Idefics3 8B, SmolVLM 256M, 500M and 2.2B",
        "as `llama`; accepts images",
    ),
    "internlm3": Family(llama.internlm3, "InternLM3", "biases in some", has_remote_code=True),
    "internvl": Family(
        multimodal.internvl,
        "InternVL3 and 3.5, those converted for transformers (`-hf`, `-HF`)",
        "as `qwen2`, `qwen3`, `qwen3_moe` or `llama`; accepts images, video",
    ),
    "iquestcoder": Family(llama.iquestcoder, "IQuest-Coder V1", "", has_remote_code=True),
    "jais2": Family(ungated.jais2, "Jais 2", "layer norms, biases, ungated MLP with squared ReLU"),
    "jamba": Family(
        mamba1.jamba,
        "Jamba 1.5 to 1.7 Mini and Large, Jamba Reasoning 3B",
        "selective state spaces (Mamba-1) in most layers, no rope, experts in some",
        has_remote_code=True,
    ),
    "kimi_k2": Family(
        deepseek.deepseek_v3, "Kimi K2, K2 Thinking", "as `deepseek_v3`", has_remote_code=True
    ),
    "kimi_linear": Family(
        kimi_linear.kimi_linear,
        "Kimi Linear 48B-A3B",
        "gated delta rule with a decay per channel, latent attention without rope, experts",
        has_remote_code=True,
    ),
    "lfm2": Family(hybrid.lfm2, "LFM2 350M to 2.6B", "gated short convolutions, QK norms"),
    "lfm2_moe": Family(
        hybrid.lfm2_moe, "LFM2-8B-A1B, 24B-A2B", "the same; experts by corrected sigmoids"
    ),
    "lfm3": Family(
        hybrid.lfm3,
        "LFM3 1.7B",
        "as `lfm2`; norms before and after, gated heads, windows with their own rope",
    ),
    "llama": Family(llama.llama, "Llama 2 and 3.x, SmolLM 1 and 2, Yi, many more", ""),
    "llama4": Family(
        multimodal.llama_4, "Llama 4 Scout and Maverick", "as `llama4_text`; text only"
    ),
    "llama4_text": Family(
        llama4.llama4_text,
        "Llama 4, text model only",
        "chunked attention, layers without rope, unit QK norms, experts weigh their inputs",
    ),
    "llava": Family(
        multimodal.llava,
        "LLaVA 1.5, LLaVA-Interleave, Pixtral 12B",
        "as `llama`, `mistral` or `qwen2`; accepts images",
    ),
    "mamba": Family(mamba1.mamba, "Mamba 130M to 2.8B", "as `mamba2`; states of channels"),
    "mamba2": Family(
        mamba2.mamba2,
        "Mamba-2 130M to 2.7B, Codestral Mamba 7B",
        "selective state spaces (Mamba-2) alone: no attention, no MLPs, no positions",
    ),
    "mellum": Family(
        moe.mellum, "Mellum 2 12B-A2.5B", "as `qwen3_moe`; windows with their own rope"
    ),
    "mimo_v2_flash": Family(
        mimo.mimo_v2_flash,
        "MiMo-V2-Flash",
        "values narrower than keys, windows with sinks, experts as in DeepSeek-V3",
        has_remote_code=True,
    ),
    "minicpm3": Family(
        deepseek.minicpm3,
        "MiniCPM3 4B",
        "latent attention, three multipliers, LongRoPE",
        has_remote_code=True,
    ),
    "minimax_m2": Family(
        moe.minimax_m2,
        "MiniMax-M2 to M2.5",
        "QK norms over all heads, partial rope, experts by corrected sigmoids",
        has_remote_code=True,
    ),
    "ministral": Family(llama.ministral, "Ministral 8B", "windows"),
    "ministral3": Family(
        llama.ministral3, "Ministral 3, text model only", "queries that grow with position"
    ),
    "mistral": Family(llama.mistral, "Mistral, Ministral", "windows in some"),
    "mistral3": Family(
        multimodal.mistral3,
        "Mistral Small 3.1, 3.2 and 4, Ministral 3",
        "as `mistral`, `ministral3` or `mistral4`; accepts images",
    ),
    "mistral4": Family(
        deepseek.mistral4,
        "Mistral Small 4, text model only",
        "latent attention, queries that grow with position, routed and shared experts",
    ),
    "mixtral": Family(moe.mixtral, "Mixtral", "experts"),
    "nemotron": Family(
        ungated.nemotron,
        "Nemotron-4, Minitron",
        "layer norms, partial rope, ungated MLP with squared ReLU",
    ),
    "nemotron_h": Family(
        nemotron_h.nemotron_h,
        "Nemotron-H 8B to 56B, Nemotron Nano 2 9B and 12B, Nemotron 3 Nano and Super",
        "selective state spaces (Mamba-2), attention without rope and MLPs as layers of their own, "
        "ungated MLP with squared ReLU; experts as in DeepSeek-V3 in some, of latents in Super",
        has_remote_code=True,
    ),
    "olmo": Family(
        olmo.olmo,
        "OLMo 1B and 7B, OLMo 1.7",
        "layer norms without weights, clipped queries, keys and values in some",
    ),
    "olmo2": Family(olmo.olmo2, "OLMo 2", "norms after attention and MLP, QK norms over all heads"),
    "olmo3": Family(olmo.olmo3, "OLMo 3", "the same; windows with their own rope"),
    "olmo_hybrid": Family(
        hybrid.olmo_hybrid,
        "OLMo Hybrid 7B",
        "gated delta rule in three of four layers, norms after attention only",
    ),
    "olmoe": Family(olmo.olmoe, "OLMoE", "QK norms over all heads, experts"),
    "opt": Family(
        gpt.opt,
        "OPT, except 350M",
        "learned positions, layer norms, biases, ungated MLP with ReLU",
    ),
    "phi": Family(
        phi.phi,
        "Phi-1, Phi-1.5, Phi-2",
        "layer norms, parallel attention and ungated MLP, biases, partial rope",
        has_remote_code=True,
    ),
    "phi3": Family(
        llama.phi3,
        "Phi-3, Phi-3.5, Phi-4",
        "windows, LongRoPE, partial rope in some",
        has_remote_code=True,
    ),
    "phimoe": Family(
        phi.phimoe,
        "Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE",
        "layer norms, biases, LongRoPE in some, experts by SparseMixer",
        has_remote_code=True,
    ),
    "qwen2": Family(llama.qwen2, "Qwen2, Qwen2.5", "biases, windows in some"),
    "qwen2_5_vl": Family(multimodal.qwen_vl, "Qwen2.5-VL", "as `qwen2`; accepts images, video"),
    "qwen2_moe": Family(
        moe.qwen2_moe, "Qwen1.5-MoE, Qwen2-57B-A14B", "biases, experts and a gated shared expert"
    ),
    "qwen2_vl": Family(multimodal.qwen_vl, "Qwen2-VL", "as `qwen2`; accepts images, video"),
    "qwen3": Family(llama.qwen3, "Qwen3, dense", "QK norms"),
    "qwen3_5": Family(multimodal.qwen3_5, "Qwen3.5", "as `qwen3_5_text`; accepts images, video"),
    "qwen3_5_moe": Family(
        multimodal.qwen3_5_moe,
        "Qwen3.5 35B-A3B and larger",
        "as `qwen3_5_moe_text`; accepts images, video",
    ),
    "qwen3_5_moe_text": Family(
        partial(hybrid.qwen3_5_moe, mrope=QWEN3_5_MROPE),
        "Qwen3.5 with experts, text model only",
        "as `qwen3_5_text`; experts and a gated shared expert",
    ),
    "qwen3_5_text": Family(
        partial(hybrid.qwen3_5, mrope=QWEN3_5_MROPE),
        "Qwen3.5, text model only",
        "gated delta rule in three of four layers, gated attention, QK norms, partial rope",
    ),
    "qwen3_moe": Family(moe.qwen3_moe, "Qwen3-30B-A3B, Qwen3-235B-A22B", "QK norms, experts"),
    "qwen3_next": Family(
        hybrid.qwen3_next, "Qwen3-Next", "as `qwen3_5_text`; experts and a gated shared expert"
    ),
    "qwen3_vl": Family(multimodal.qwen3_vl, "Qwen3-VL, dense", "as `qwen3`; accepts images, video"),
    "qwen3_vl_moe": Family(
        multimodal.qwen3_vl_moe,
        "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
        "as `qwen3_moe`; accepts images, video",
    ),
    "seed_oss": Family(llama.seed_oss, "Seed-OSS", "biases"),
    "smollm3": Family(llama.smollm3, "SmolLM3", "no rope in every fourth layer"),
    "smolvlm": Family(
        multimodal.idefics3,
        "SmolVLM2 256M, 500M and 2.2B",
        "as `llama`; accepts images, not video",
    ),
    "solar_open": Family(glm.solar_open, "Solar Open", "as `glm4_moe`, full rope"),
    "stablelm": Family(llama.stablelm, "StableLM", "layer norms, partial rope"),
    "starcoder2": Family(
        ungated.starcoder2, "StarCoder2", "layer norms, biases, ungated MLP, windows in some"
    ),
    "vaultgemma": Family(gemma.vaultgemma, "VaultGemma 1B", "as `gemma2`; norms before only"),
    "youtu": Family(deepseek.youtu, "Youtu-LLM 2B", "latent attention"),
    **AUDIO_TEXT,
    **IMAGE_TEXT,
}


def read_spec(config: dict[str, Any]) -> DecoderSpec | EncoderSpec:
    """Return the spec of a model from its parsed config.json.

    Raises:
        ModelLoadError: the architecture is unknown, a value is out of range, or a key is not
            understood; one line that names it.
    """
    reader = ConfigReader(config)
    model_type = reader.text("model_type", "")
    family, encoder = FAMILIES.get(model_type), ENCODERS.get(model_type)
    if family is not None and family.has_remote_code:
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
    reader.section("quantization_config")  # see engine/quantization/formats
    spec = with_head(family.read(reader), reader)
    reader.finish()
    return spec
