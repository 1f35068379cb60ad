"""The parameters of a decoder, and where every tensor of a checkpoint goes.

A *parameter* is a tensor of the decoder, named here; a *part* is the slice of its first dimension
that one checkpoint tensor fills. Fused projections have several parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from engine.models.altup_parameters import altup_layer_parameters, altup_parameters
from engine.models.latent_spec import LatentSpec
from engine.models.layouts import Layout
from engine.models.names import rules_of
from engine.models.parameter import Parameter
from engine.models.recurrent_parameters import recurrent_parameters
from engine.models.rules import Rule
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec

# Of the layers, also within a model that sees or hears.
_LAYERS = (
    r"(?:(?:language_model\.|thinker\.)?(?:model|backbone)|model\.language_model)\.layers\.\d+\."
)
# Buffers in older checkpoints, which are computed here.
_COMPUTED = re.compile(
    rf"{_LAYERS}self_attn\.rotary_emb\.inv_freq"
    r"|gpt_neox\.layers\.\d+\.attention\.(rotary_emb\.inv_freq|bias|masked_bias)"
    r"|(transformer\.)?h\.\d+\.attn\.(attention\.)?(bias|masked_bias|causal_mask)"
)
# Calibrated scales of a quantised KV cache. Ours are per row
# (``kernels/reference/cache_quantisation.py``): they never clip, which makes the calibrated ones
# redundant.
_CACHE_SCALES = re.compile(
    rf"{_LAYERS}(?:self_attn|mixer)\.((attn\.)?[qkv]_scale|kv_scale|prob_scale"
    r"|k_proj\.(k_scale|kv_scale|output_scale)|v_proj\.(v_scale|kv_scale|output_scale))"
)


# What files have for layers that do not use it.
_LEFT_OVER = {"axk1": re.compile(rf"{_LAYERS}post_mlp_layernorm\.weight")}
_EXPERT = re.compile(rf"{_LAYERS}mlp\.experts\.(\d{{1,5}})\.\w+_proj\.weight")
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d{1,5})\.")
_KEYS_AND_VALUES = re.compile(
    r"model\.(?:language_model\.)?layers\.(\d{1,5})\.self_attn\.(?:[kv]_proj|[kv]_norm)\."
)


class Target(NamedTuple):
    """Where a checkpoint tensor goes, and in which layout it is stored."""

    parameter: str
    part: int | None  # None: it fills all of them
    layout: Layout | None = None  # None: as in the parameter


def parameters(spec: DecoderSpec) -> dict[str, Parameter]:
    """Return all parameters of a decoder or pipeline stage, by name.

    Layers are numbered as in the whole model.
    """
    found = _embed_and_head(spec) if spec.has_embed_and_head else {}
    if spec.has_final_norm:
        found |= _norm(spec, "norm", spec.hidden_size)
    for i, layer_spec in enumerate(spec.layers, spec.first_layer):
        own = spec.for_layer(layer_spec)
        is_dense = layer_spec.mlp and (not layer_spec.experts or _has_mlp_and_experts(spec))
        mlp = _mlp(own) if is_dense else {}
        if layer_spec.experts and spec.moe:
            mlp |= _experts(spec, spec.moe)
        if layer_spec.experts_aside and spec.moe:
            mlp |= _experts(spec, spec.moe)
        mixer = {} if layer_spec.recurrent else _attention(own)
        if spec.latent is not None and not layer_spec.shares_selection:
            mixer |= _indexer(spec.hidden_size, spec.latent)
        if spec.source is not None:
            mixer |= _cross_attention(own)
        if layer_spec.has_recurrence and spec.recurrence:
            mixer |= recurrent_parameters(spec.recurrence, spec.hidden_size)
        layer = mixer | mlp | _norms(own, layer_spec)
        if spec.per_layer_size:
            layer |= _per_layer(spec)
        if spec.altup is not None:
            layer |= altup_layer_parameters(spec.altup, spec.hidden_size)
        if spec.layer_scales:
            layer["scale"] = Parameter((1,), is_norm=True, is_float32=True)
        found |= {f"{i}.{name}": parameter for name, parameter in layer.items()}
    return found


def targets(
    spec: DecoderSpec, wanted: Mapping[str, Parameter], rules: tuple[Rule, ...] | None = None
) -> dict[str, Target]:
    """Return checkpoint name -> place, for every part of every parameter.

    The names are the family's in Hugging Face format, or those of other ``rules``.
    """
    places: dict[str, Target] = {}
    num_experts = spec.moe.num_experts if spec.moe else 0
    for rule in rules_of(spec.naming or spec.architecture) if rules is None else rules:
        for i in range(spec.num_layers if "{i}" in rule.parameter else 1):
            parameter = rule.parameter.replace("{i}", str(i))
            if parameter not in wanted or wanted[parameter].is_one:
                continue
            mixer, mlp = spec.layers[i].checkpoint_layers or (i, i)
            name = rule.pattern.replace("{i}", str(mixer)).replace("{m}", str(mlp))
            if "{e}" in name:
                for e in range(num_experts):
                    part = (rule.part or 0) + e * rule.parts_per_expert
                    places[name.replace("{e}", str(e))] = Target(parameter, part, rule.layout)
            elif "{h}" in name:
                for h in range(len(wanted[parameter].parts)):
                    places[name.replace("{h}", str(h))] = Target(parameter, h, rule.layout)
            elif (rule.part or 0) < len(wanted[parameter].parts):  # values may be keys
                places[name] = Target(parameter, rule.part, rule.layout)
    return places


_GEMMA4_TOWERS = (
    *("model.vision_tower.", "model.embed_vision.", "model.vision_embedder."),
    *("model.audio_tower.", "model.embed_audio."),
)
# Exporters differ in whether the outer model's name comes first.
_VISUAL = ("visual.", "model.visual.")
_PROJECTED = (
    *("vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
)
_HEARING = (
    *("audio_tower.", "multi_modal_projector."),
    *("model.audio_tower.", "model.multi_modal_projector."),
)
_THINKING = ("audio_tower.", "visual.")
_SPEAKING = ("thinker.audio_tower.", "thinker.visual.", "talker.", "token2wav.", "code2wav.")
_IDEFICS3 = ("model.vision_model.", "model.connector.")
# As NVIDIA publishes them, and as Hugging Face's own code names them.
_NEMOTRON_OMNI = (
    *("vision_model.", "mlp1.", "sound_encoder.", "sound_projection.", "language_model.mtp."),
    *("multi_modal_projector.", "audio_tower.", "embed_audio.", "vision_final_layernorm.", "mtp."),
)
# Checkpoint parts that are not served: vision parts, and multi-token prediction layers that are not
# named as ``num_draft_layers`` additional layers of the model.
_UNREAD = {
    "aya_vision": _PROJECTED,
    "cohere2_vision": _PROJECTED,
    "ernie4_5_moe": ("model.mtp_",),
    "exaone4_5": (*_VISUAL, "mtp."),
    "exaone_moe": ("mtp.",),
    "gemma3": _PROJECTED,
    **dict.fromkeys(("gemma3n", "gemma4"), _GEMMA4_TOWERS),
    "gemma4_unified": _GEMMA4_TOWERS,
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe"), _VISUAL),
    "glm_ocr": (*_VISUAL, "model.language_model.layers.16."),  # the last: a draft layer
    "idefics3": _IDEFICS3,
    "internvl": _PROJECTED,
    "kimi_k25": ("vision_tower.", "mm_projector."),
    **dict.fromkeys(("lfm2_vl", "lfm3_vl"), _PROJECTED),
    "lighton_ocr": ("model.vision_encoder.", "model.vision_projection."),
    "longcat_flash": ("model.mtp.",),
    "llama4": ("vision_model.", "multi_modal_projector."),
    "llava": _PROJECTED,
    **dict.fromkeys(
        ("llava_next", "llava_onevision"), (*_PROJECTED, "image_newline", "model.image_newline")
    ),
    "mellum": ("mtp.",),
    "mimo_v2_flash": ("model.mtp.",),
    "minicpmv4_6": ("model.vision_tower.", "model.merger.", "mtp."),
    "mistral3": _PROJECTED,
    "muse_glimmer": (
        *("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
        "model.perception_emb_norm.",
    ),
    "paddleocr_vl": ("visual.", "mlp_AR."),
    "nemotron_h": ("mtp.",),
    **dict.fromkeys(
        ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "nemotron_h_omni"),
        _NEMOTRON_OMNI,
    ),
    "qwen2_audio": _HEARING,
    "qwen3_asr": _HEARING,
    "qwen3_5": (*_VISUAL, "mtp."),
    "qwen3_5_moe": (*_VISUAL, "mtp."),
    "qwen3_5_moe_text": ("mtp.",),
    "qwen3_5_text": ("mtp.",),
    "qwen3_next": ("mtp.",),
    "qwen2_5_omni": _SPEAKING,
    "qwen2_5_omni_thinker": _THINKING,
    "qwen2_5_vl": _VISUAL,
    "qwen2_vl": _VISUAL,
    "qwen3_omni_moe": _SPEAKING,
    "qwen3_omni_moe_thinker": _THINKING,
    "qwen3_vl": _VISUAL,
    "qwen3_vl_moe": _VISUAL,
    "smolvlm": _IDEFICS3,
    "step3p7": ("vision_model.", "vit_large_projector."),
    "voxtral": _HEARING,
    "whisper": ("model.encoder.",),
}


def is_skippable(spec: DecoderSpec, name: str) -> bool:
    """Return whether a tensor without a place may be skipped.

    It may be a computed buffer, a tied copy, a scale of the KV cache, part of a draft layer,
    something that its layer does not use, or outside the text model.
    """
    tied_copy = spec.tie_word_embeddings and name.endswith(("lm_head.weight", "proj_out.weight"))
    if name.startswith(_UNREAD.get(spec.architecture, ())):
        return True
    left_over = _LEFT_OVER.get(spec.architecture)
    if left_over is not None and left_over.fullmatch(name):
        return True
    is_computed = _COMPUTED.fullmatch(name) or _CACHE_SCALES.fullmatch(name)
    is_unread = is_computed is not None or _is_draft_layer(spec, name) or _is_shared_kv(spec, name)
    return tied_copy or is_unread or _is_identity_expert(spec, name)


def has_qwen_mtp(spec: DecoderSpec) -> bool:
    """Return whether checkpoints have multi-token prediction as Qwen3-Next and Qwen3.5 do.

    Its tensors are under ``mtp.``, not in an additional layer.
    """
    architecture = spec.architecture
    return architecture.startswith("qwen3") and "mtp." in _UNREAD.get(architecture, ())


def base_prefix(spec: DecoderSpec) -> str:
    """Return the prefix of names in a whole model, absent in exports without the head."""
    rules = rules_of(spec.naming or spec.architecture)
    embedding = next(rule for rule in rules if rule.parameter == "embedding")
    return embedding.pattern.partition(".")[0] + "."


def _is_shared_kv(spec: DecoderSpec, name: str) -> bool:
    """Return whether it would make keys or values in a layer that reads another layer's."""
    found = _KEYS_AND_VALUES.match(name)
    if found is None or int(found[1]) >= spec.num_layers:
        return False
    return spec.layers[int(found[1])].kv_sharing_layer is not None


def _is_identity_expert(spec: DecoderSpec, name: str) -> bool:
    """Return whether it belongs to an expert that returns what it reads: transformers saves it."""
    if spec.moe is None or not spec.moe.num_identity_experts:
        return False
    found = _EXPERT.fullmatch(name)
    return found is not None and spec.moe.num_experts <= int(found[1]) < spec.moe.num_choices


def _is_draft_layer(spec: DecoderSpec, name: str) -> bool:
    count = spec.num_draft_layers + spec.num_unread_layers
    layer = _LAYER.match(name) if count else None
    drafting = range(spec.num_layers, spec.num_layers + count)
    return layer is not None and int(layer[1]) in drafting


def _embed_and_head(spec: DecoderSpec) -> dict[str, Parameter]:
    hidden = spec.hidden_size
    found = {"embedding": Parameter((spec.vocab_size,), (hidden,))}
    if spec.embedding_norm:
        found |= _norm(spec, "embedding_norm", hidden)
    if spec.rope is None:
        found["positions"] = Parameter((spec.num_learned_positions,), (hidden,))
    if spec.num_labels:
        found["score"] = Parameter((spec.num_labels,), (hidden,))
    if spec.per_layer_size:
        width = spec.num_remaining_layers * spec.per_layer_size
        found["per_layer.embedding"] = Parameter((spec.per_layer_vocab_size,), (width,))
        found["per_layer.projection.weight"] = Parameter((width,), (hidden,))
        found |= _norm(spec, "per_layer.norm", spec.per_layer_size)
    if spec.altup is not None:
        found |= altup_parameters(spec.altup, hidden)
    if spec.is_generative and not spec.tie_word_embeddings:
        found["head"] = Parameter((spec.vocab_size,), (hidden,))
    if spec.is_generative and spec.head_bias:
        found["head.bias"] = Parameter((spec.vocab_size,))
    return found


def _attention(spec: DecoderSpec) -> dict[str, Parameter]:
    hidden, qkv = spec.hidden_size, spec.qkv_sizes
    runs: tuple[tuple[int, ...], ...] = ()
    if spec.gate_size and not spec.separate_gates:  # part of the queries, and first among them
        runs = ((spec.gate_size, spec.query_size), *((size,) for size in qkv[1:]))
    found = {
        "qkv.weight": Parameter(qkv, (hidden,), runs=runs),
        "output.weight": Parameter((hidden,), (spec.attention_output_size,)),
        **(_latent(spec, spec.latent) if spec.latent else {}),
    }
    if spec.qkv_bias and spec.key_bias:
        found["qkv.bias"] = Parameter(qkv, runs=runs)
    elif spec.qkv_bias:
        found["query.bias"] = Parameter(qkv[:1])
        found["value.bias"] = Parameter(qkv[2:])
    if spec.output_bias:
        found["output.bias"] = Parameter((hidden,))
    if spec.has_sinks:
        found["sinks"] = Parameter((spec.num_heads,), is_float32=True)
    return found


def _cross_attention(spec: DecoderSpec) -> dict[str, Parameter]:
    """The parameters of attention to a source; see ``engine/models/cross_attention.py``."""
    hidden, heads, kv_size = spec.hidden_size, spec.query_size, spec.kv_size
    return {
        "cross.query.weight": Parameter((heads,), (hidden,)),
        "cross.query.bias": Parameter((heads,)),
        "cross.key_value.weight": Parameter((kv_size, kv_size), (hidden,)),
        "cross.value.bias": Parameter((kv_size,)),
        "cross.output.weight": Parameter((hidden,), (heads,)),
        "cross.output.bias": Parameter((hidden,)),
        **_norm(spec, "cross_norm", hidden),
    }


def _latent(spec: DecoderSpec, latent: LatentSpec) -> dict[str, Parameter]:
    up = spec.num_heads * (latent.nope_dim + latent.value_dim)
    found = {
        "latent_norm": Parameter((latent.rank,), is_norm=True),
        "latent_up": Parameter((up,), (latent.rank,)),
    }
    if latent.query_rank is not None:
        queries = spec.num_heads * latent.query_outputs
        found["query_norm"] = Parameter((latent.query_rank,), is_norm=True)
        found["query_up.weight"] = Parameter((queries,), (latent.query_inputs or 0,))
    return found


def _indexer(hidden: int, latent: LatentSpec) -> dict[str, Parameter]:
    """The parameters of an indexer; see ``engine/models/indexer.py``."""
    if latent.indexer is None or latent.query_rank is None:
        return {}
    indexer, query_rank = latent.indexer, latent.query_rank
    width = indexer.head_dim
    return {
        "index.query.weight": Parameter((indexer.num_heads * width,), (query_rank,)),
        "index.key.weight": Parameter((width,), (hidden,)),
        "index.key_norm": Parameter((width,), is_norm=True),
        "index.key_norm.bias": Parameter((width,)),
        "index.weights": Parameter((indexer.num_heads,), (hidden,), is_float32=True),
    }


def _mlp(spec: DecoderSpec) -> dict[str, Parameter]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    up = (inner, inner) if spec.gated else (inner,)
    found = {
        "gate_up.weight": Parameter(up, (hidden,)),
        "down.weight": Parameter((hidden,), (inner,)),
    }
    if spec.activation == "xielu":
        found["xielu"] = Parameter((1, 1, 1, 1), is_float32=True)
    if spec.mlp_bias:
        found |= {"gate_up.bias": Parameter(up), "down.bias": Parameter((hidden,))}
    return found


def _experts(spec: DecoderSpec, moe: MoeSpec) -> dict[str, Parameter]:
    """All experts of a layer concatenated in one tensor; no rows for experts of other ranks."""
    hidden, inner, shared = spec.hidden_size, moe.intermediate_size, moe.shared_intermediate_size
    begin, end = moe.local_expert_range or (0, moe.num_experts)
    is_held = [begin <= expert < end for expert in range(moe.num_experts)]
    read = moe.latent_size or hidden
    entry = ("gate", "up") if spec.gated else ("up",)
    gate_up = tuple(inner if held else 0 for held in is_held for _ in entry)
    down = tuple(read if held else 0 for held in is_held)
    found = {
        "router": Parameter((moe.num_choices,), (hidden,), is_float32=moe.router_in_float32),
        "experts.gate_up": Parameter(gate_up, (read,)),
        "experts.down": Parameter(down, (inner,)),
    }
    if moe.latent_size:
        found["latent.enter.weight"] = Parameter((read,), (hidden,))
        found["latent.leave.weight"] = Parameter((hidden,), (read,))
    if moe.biased:
        found["router.bias"] = Parameter((moe.num_choices,))
        found |= {"experts.gate_up.bias": Parameter(gate_up), "experts.down.bias": Parameter(down)}
    if moe.has_correction_bias:
        found["router.correction"] = Parameter((moe.num_choices,), is_float32=True)
    if shared:
        found["shared.gate_up.weight"] = Parameter((shared,) * len(entry), (hidden,))
        found["shared.down.weight"] = Parameter((hidden,), (shared,))
    if moe.shared_gate:
        found["shared.gate"] = Parameter((1,), (hidden,))
    if moe.with_mlp:
        found |= _norm(spec, "mlp_own_after", hidden)
        found |= _norm(spec, "experts_norm", hidden)
        found |= _norm(spec, "experts_after", hidden)
        found["router.norm"] = Parameter((hidden,), is_norm=True)
        found["experts.scale"] = Parameter((moe.num_experts,), is_norm=True, is_float32=True)
    return found


def _per_layer(spec: DecoderSpec) -> dict[str, Parameter]:
    """The parameters of a layer's own embeddings; see ``engine/models/per_layer.py``."""
    return {
        "per_layer.gate.weight": Parameter((spec.per_layer_size,), (spec.hidden_size,)),
        "per_layer.output.weight": Parameter((spec.hidden_size,), (spec.per_layer_size,)),
        **_norm(spec, "per_layer.after", spec.hidden_size),
    }


def _has_mlp_and_experts(spec: DecoderSpec) -> bool:
    """Return whether layers with experts have an MLP too."""
    return spec.moe is not None and spec.moe.with_mlp


def _norms(spec: DecoderSpec, layer: LayerSpec) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    if spec.has_input_norms(layer):
        found |= _norm(spec, "attention_norm", spec.hidden_size)
        if layer.mlp and not spec.shared_norm:
            found |= _norm(spec, "mlp_norm", spec.hidden_size)
    if spec.has_output_norms(layer):
        found |= _norm(spec, "attention_after", spec.hidden_size)
    if layer.mlp and (spec.has_output_norms(layer) or layer.mlp_output_norm):
        found |= _norm(spec, "mlp_after", spec.hidden_size)
    if spec.norm_gate_rank:
        gated = ("attention_norm", "mlp_norm") if layer.experts else ("attention_norm",)
        for name in gated:
            sizes = spec.norm_gate_rank, spec.hidden_size
            found[f"{name}.gate_down.weight"] = Parameter(sizes[:1], sizes[1:])
            found[f"{name}.gate_up.weight"] = Parameter(sizes[1:], sizes[:1])
    if spec.qk_layer_norm:
        for name, heads in (("query_norm", spec.num_heads), ("key_norm", spec.num_kv_heads)):
            parts = (1,) * heads if spec.separate_head_norms else (heads,)
            found[name] = Parameter(parts, (spec.head_dim,), is_norm=True)
    if (spec.qk_norm or spec.wide_qk_norm) and not layer.recurrent:
        head = spec.head_dim
        query, key = (head, head) if spec.qk_norm else (spec.query_size, spec.kv_size)
        found["query_norm"] = Parameter((query,), is_norm=True)
        if not spec.uses_shared_kv:
            found["key_norm"] = Parameter((key,), is_norm=True)
    return found


def _norm(spec: DecoderSpec, name: str, size: int) -> dict[str, Parameter]:
    found = {name: Parameter((size,), is_norm=True, is_one=not spec.norm.has_weight)}
    if spec.norm.bias:
        found[f"{name}.bias"] = Parameter((size,))
    return found
