"""DeepSeek-V2, V3 and other models with latent attention; shared, routed and grouped experts."""

from __future__ import annotations

import dataclasses
import math

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_rope
from engine.models.families.shared import (
    TEMPERATURE_ROPE_KEYS,
    ignore_router_training,
    num_layers,
    read_decoder,
    read_temperature,
    with_checked_experts,
)
from engine.models.latent_spec import IndexerSpec, LatentSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec

_SHARED = ("n_shared_experts", "num_shared_experts")  # DeepSeek's name and EXAONE's
_TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size", "router_aux_loss_coef")


def deepseek_v2(reader: ConfigReader) -> DecoderSpec:
    """DeepSeek-V2 and V2-Lite: softmax experts, with or without groups."""
    reader.require("scoring_func", "softmax")
    reader.require("norm_topk_prob", False)
    reader.require("mlp_bias", False)
    method = reader.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.error("topk_method", f"is {method[:80]!r}, which is not supported")
    num_groups, top_groups = _groups(reader)
    if method == "greedy":
        num_groups = top_groups = 1
    moe = dataclasses.replace(
        _experts(reader),
        num_groups=num_groups,
        top_groups=top_groups,
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    return _deepseek(reader, moe, first_dense=0, interleaved=True)


def deepseek_v3(reader: ConfigReader) -> DecoderSpec:
    """DeepSeek-V3 and R1: sigmoid experts, chosen by corrected scores."""
    moe = read_deepseek_v3_experts(reader, groups=(8, 4), scale=2.5)
    return _deepseek(reader, moe, first_dense=3, interleaved=reader.flag("rope_interleave", True))


def axk1(reader: ConfigReader) -> DecoderSpec:
    """A.X K1: DeepSeek-V3's layers; the output of those with experts is normed."""
    reader.ignore("topk_method")  # the published model has no corrections; all else is the same
    moe = read_deepseek_v3_experts(reader, groups=(8, 4), scale=2.5, is_method_named=False)
    interleaved = reader.flag("rope_interleave", True)
    spec = _deepseek(reader, moe, first_dense=1, interleaved=interleaved, max_positions=32_768)
    assert spec.latent is not None
    if spec.latent.query_rank is None:
        raise reader.error("q_lora_rank", "is absent")
    return dataclasses.replace(
        spec,
        layers=tuple(
            dataclasses.replace(layer, mlp_output_norm=layer.experts) for layer in spec.layers
        ),
        optional=("router_corrections",),
        naming="",
    )


def glm4_moe_lite(reader: ConfigReader) -> DecoderSpec:
    """GLM-4.7-Flash: DeepSeek-V3's layers in GLM's sizes."""
    moe = read_deepseek_v3_experts(reader, scale=1.8)
    return _deepseek(reader, moe, first_dense=1, interleaved=reader.flag("rope_interleave", True))


def deepseek_v32(reader: ConfigReader) -> DecoderSpec:
    """DeepSeek-V3.2: V3 with an indexer in each layer, whose rotated dimensions lie in halves."""
    return _sparse(reader, groups=(8, 4), interleaved=False, max_positions=163_840)


def axk2(reader: ConfigReader) -> DecoderSpec:
    """A.X K2: DeepSeek-V3.2's layers with gated norms and gated attention.

    Hugging Face's code scores experts outside a token's groups 0, which is here below all others:
    the same, if ``num_experts_per_tok`` experts within have positive scores with their corrections.
    """
    reader.set_defaults({"index_n_heads": 16, "first_k_dense_replace": 1, "q_lora_rank": 384})
    reader.set_defaults({"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32})
    reader.set_defaults({"v_head_dim": 64})
    rank = reader.count("gated_norm_rank", 16)
    spec = _sparse(reader, groups=(1, 1), interleaved=False, max_positions=131_072)
    assert spec.latent is not None
    return dataclasses.replace(
        spec,
        latent=dataclasses.replace(spec.latent, gates_output=True),
        norm_gate_rank=rank,
        naming="",
        num_draft_layers=0,
        num_unread_layers=spec.num_draft_layers,
    )


def glm_moe_dsa(reader: ConfigReader) -> DecoderSpec:
    """GLM-5: DeepSeek-V3.2's layers without groups of experts; some share a selection."""
    reader.require("indexer_rope_interleave", True)
    reader.require("moe_router_dtype", "float32")
    shares = _shares_selection(reader)
    spec = _sparse(reader, groups=(1, 1), interleaved=True, max_positions=202_752)
    layers = zip(spec.layers, shares, strict=True)
    return dataclasses.replace(
        spec,
        layers=tuple(dataclasses.replace(each, shares_selection=shared) for each, shared in layers),
    )


def mistral4(reader: ConfigReader) -> DecoderSpec:
    """Mistral Small 4: softmax experts, and a query factor that grows with the position."""
    moe = dataclasses.replace(
        _grouped(reader, _experts(reader)),
        router_in_float32=False,
        normalised=reader.flag("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    interleaved = reader.flag("rope_interleave", True)
    reader.ignore("head_dim")  # the sum of plain and rotary dimensions
    spec = _deepseek(
        reader,
        moe,
        first_dense=0,
        interleaved=interleaved,
        max_positions=1_048_576,
        rope_extra_keys=TEMPERATURE_ROPE_KEYS,
        rotates_query=True,
    )
    return dataclasses.replace(spec, temperature=read_temperature(reader))


def minicpm3(reader: ConfigReader) -> DecoderSpec:
    """MiniCPM3 4B: DeepSeek-V2's attention, an MLP in all layers, three multipliers."""
    reader.require("mlp_bias", False)
    reader.ignore("head_dim")  # the rotary dimensions
    hidden_size, num_heads = reader.count("hidden_size", 2560), reader.count("num_attention_heads")
    reader.set_defaults({"scale_depth": 1.4, "dim_model_base": 256})  # null is none of them
    reader.set_defaults({"v_head_dim": hidden_size // num_heads, "kv_lora_rank": 256})
    reader.set_defaults({"q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32})
    spec = _deepseek(reader, None, interleaved=False, tied=True, max_positions=32_768)
    depth = reader.optional_number("scale_depth")
    base = reader.optional_count("dim_model_base")
    return dataclasses.replace(
        spec,
        embedding_scale=reader.number("scale_emb", 12.0),
        residual_scale=1.0 if depth is None else depth / math.sqrt(spec.num_layers),
        logit_scale=1.0 if base is None else base / hidden_size,
    )


def youtu(reader: ConfigReader) -> DecoderSpec:
    """Youtu-LLM 2B: DeepSeek-V3's attention, an MLP in all layers."""
    reader.ignore("embedding_initializer_range")
    interleaved = reader.flag("rope_interleave", True)
    return _deepseek(reader, None, interleaved=interleaved, tied=True, max_positions=131_072)


def read_deepseek_v3_experts(
    reader: ConfigReader,
    *,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    normalised: bool = True,
    is_method_named: bool = True,
) -> MoeSpec:
    """Read experts like DeepSeek-V3's: sigmoid scores, chosen after adding a bias.

    Args:
        reader: the config.
        groups, scale, normalised: the family's defaults for absent keys.
        is_method_named: ``topk_method`` must be that one, if it is present.

    Raises:
        ModelLoadError: a value is missing or out of range.
    """
    if not reader.has_value("scoring_func", "noaux_tc"):  # dots.llm1's value
        reader.require("scoring_func", "sigmoid")
    if is_method_named:
        reader.require("topk_method", "noaux_tc")
    return dataclasses.replace(
        _grouped(reader, _experts(reader), groups),
        scoring="sigmoid",
        has_correction_bias=True,
        normalised=reader.flag("norm_topk_prob", normalised),
        scale=reader.number("routed_scaling_factor", scale),
    )


def layers_with_experts(reader: ConfigReader, first_dense: int) -> tuple[LayerSpec, ...]:
    """Return layers with experts in all but the first few, or as ``mlp_layer_types`` says."""
    reader.require("moe_layer_freq", 1)
    count, dense = num_layers(reader), first_dense
    if "first_k_dense_replace" in reader:
        dense = reader.non_negative("first_k_dense_replace")
    kinds = reader.list_of_length("mlp_layer_types", count)
    if kinds is None:
        kinds = ["sparse" if i >= dense else "dense" for i in range(count)]
    for kind in kinds:
        if kind not in ("sparse", "dense"):
            raise reader.error("mlp_layer_types", f"has {kind!r:.80}, which is not supported")
    return tuple(LayerSpec(experts=kind == "sparse") for kind in kinds)


def draft_layers(reader: ConfigReader) -> int:
    """Return the number of multi-token prediction layers, which serve as draft heads on request."""
    newer = reader.non_negative("num_mtp_layers", 0)
    return reader.non_negative("num_nextn_predict_layers", newer)


def _sparse(
    reader: ConfigReader, *, groups: tuple[int, int], interleaved: bool, max_positions: int
) -> DecoderSpec:
    """``interleaved``: the indexer's rotated dimensions are; attention's always are."""
    reader.require("rope_interleave", True)
    reader.require("mlp_bias", False)
    reader.ignore("head_dim")  # the rotary dimensions
    for kind in reader.list_of_length("layer_types", num_layers(reader)) or []:
        if kind not in ("indexed_attention", "deepseek_sparse_attention"):
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    indexer = IndexerSpec(
        num_heads=reader.count("index_n_heads", 64),
        head_dim=reader.count("index_head_dim", 128),
        top_k=reader.count("index_topk", 2048),
        interleaved=interleaved,
    )
    moe = read_deepseek_v3_experts(reader, groups=groups, scale=2.5)
    spec = _deepseek(reader, moe, first_dense=3, interleaved=True, max_positions=max_positions)
    assert spec.latent is not None
    if spec.latent.query_rank is None:
        raise reader.error("q_lora_rank", "is absent: the indexer reads the queries' latent")
    if indexer.head_dim < spec.latent.rope_dim:
        raise reader.error("index_head_dim", f"is below the {spec.latent.rope_dim} rotated ones")
    return dataclasses.replace(
        spec,
        latent=dataclasses.replace(spec.latent, indexer=indexer),
        naming="deepseek_sparse",
    )


def _shares_selection(reader: ConfigReader) -> list[bool]:
    """Return which layers use the selection of an earlier one (arXiv 2603.12201)."""
    count, names = num_layers(reader), {"full": False, "shared": True, "F": False, "S": True}
    every = reader.count("index_topk_freq", 1)
    first = reader.non_negative("index_skip_topk_offset", 2)
    shares = [max(i - first + 1, 0) % every != 0 for i in range(count)]
    key = "index_topk_freq"
    for newer in ("index_topk_pattern", "indexer_types"):  # the last one present decides
        if newer not in reader:
            continue
        key = newer
        is_list = reader.is_list(key)
        kinds = reader.list_of_length(key, count) if is_list else list(reader.text(key))[:count]
        if kinds is None or len(kinds) < count:
            raise reader.error(key, f"must name a kind for each of the {count} layers")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in names:
                raise reader.error(key, f"has {kind!r:.80}, which is not supported")
        shares = [names[kind] for kind in kinds]
    if shares[0]:
        raise reader.error(key, "lets the first layer share a selection that nothing has made")
    return shares


def _deepseek(
    reader: ConfigReader,
    moe: MoeSpec | None,
    *,
    first_dense: int = 0,
    interleaved: bool,
    max_positions: int = 4096,
    rope_extra_keys: tuple[str, ...] = (),
    rotates_query: bool = False,
    tied: bool = False,
    theta: float = 10_000.0,
) -> DecoderSpec:
    """``rotates_query``: the config has the rotated fraction of a query, not only its width."""
    ignore_router_training(reader)
    for key in (*_TRAINING, "qk_head_dim"):
        reader.ignore(key)
    query_rank = reader.optional_count("q_lora_rank")
    latent = LatentSpec(
        rank=reader.count("kv_lora_rank", 512),
        query_rank=query_rank,
        nope_dim=reader.count("qk_nope_head_dim", 128),
        rope_dim=reader.count("qk_rope_head_dim", 64),
        value_dim=reader.count("v_head_dim", 128),
    )
    bias = reader.flag("attention_bias")
    if bias and query_rank is None:
        raise reader.error("attention_bias", "is true, without 'q_lora_rank'")
    rope = read_rope(
        reader,
        theta=theta,
        trained=reader.count("max_position_embeddings", max_positions),
        head_dim=latent.query_dim if rotates_query else latent.rope_dim,
        partial=latent.rope_dim / latent.query_dim if rotates_query else 1.0,
        interleaved=interleaved,
        extra_keys=rope_extra_keys,
    )
    if rope.num_dims not in (None, latent.rope_dim):
        raise reader.error("qk_rope_head_dim", f"is not the {rope.num_dims} that are rotated")
    rope = dataclasses.replace(rope, num_dims=None)
    spec = read_decoder(
        reader,
        head_dim=latent.rope_dim,
        rope=rope,
        tied=tied,
        max_positions=max_positions,
        layers=None if moe is None else layers_with_experts(reader, first_dense),
        moe=moe,
        latent=latent,
        attention_scale=latent.query_dim**-0.5 * _temperature(reader),
        qkv_bias=bias,
        output_bias=bias,
        naming="deepseek" if query_rank is None else "deepseek_ranked",
        num_draft_layers=draft_layers(reader),
    )
    spec = dataclasses.replace(spec, num_kv_heads=1, head_dim=latent.rank + latent.rope_dim)
    return spec if moe is None else with_checked_experts(reader, spec)


def _experts(reader: ConfigReader) -> MoeSpec:
    inner = reader.count("moe_intermediate_size")
    shared = next((key for key in _SHARED if key in reader), _SHARED[0])
    return MoeSpec(
        num_experts=_num_experts(reader),
        top_k=reader.count("num_experts_per_tok"),
        intermediate_size=inner,
        normalised=False,
        router_in_float32=True,
        shared_intermediate_size=inner * (reader.optional_count(shared) or 0),
        shared_width_key=f"{shared} * moe_intermediate_size",
    )


def _num_experts(reader: ConfigReader) -> int:
    if "num_experts" not in reader:
        return reader.count("n_routed_experts")
    count = reader.count("num_experts")
    reader.require("n_routed_experts", count)
    return count


def _grouped(reader: ConfigReader, moe: MoeSpec, groups: tuple[int, int] = (1, 1)) -> MoeSpec:
    """Return the experts in groups, each scored by its two best."""
    num_groups, top_groups = _groups(reader, *groups)
    moe = dataclasses.replace(moe, num_groups=num_groups, top_groups=top_groups, group_best=2)
    if num_groups > 1 and moe.num_experts // num_groups < moe.group_best:
        raise reader.error("n_group", "leaves groups of a single expert")
    return moe


def _groups(reader: ConfigReader, groups: int = 1, top: int = 1) -> tuple[int, int]:
    """Return the number of groups, and how many of them a token may use."""
    num_groups, top_groups = reader.count("n_group", groups), reader.count("topk_group", top)
    num_experts, top_k = _num_experts(reader), reader.count("num_experts_per_tok")
    if num_experts % num_groups:
        raise reader.error("n_group", f"must divide the {num_experts} experts")
    if top_groups > num_groups:
        raise reader.error("topk_group", f"exceeds the {num_groups} groups")
    if top_k > num_experts // num_groups * top_groups:
        raise reader.error("topk_group", f"leaves fewer than {top_k} experts to choose from")
    return num_groups, top_groups


def _temperature(reader: ConfigReader) -> float:
    """Return YaRN's factor of the scores: ``(0.1 m ln(factor) + 1)^2``."""
    section = reader.section("rope_scaling") or reader.section("rope_parameters")
    if section is None or section.text("rope_type", section.text("type", "default")) == "default":
        return 1.0
    mscale = section.non_negative_number("mscale_all_dim", 0.0)  # 0: as if it were absent
    factor = section.number("factor", 1.0)
    if factor <= 1.0:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2


read_latent_decoder = _deepseek  # for models with other layers, too


FAMILIES: dict[str, Family] = {
    "axk1": Family(axk1, "A.X K1", "as `deepseek_v3`; norms after experts", has_remote_code=True),
    "axk2": Family(
        axk2, "A.X K2", "as `deepseek_v32`; gated norms and attention", has_remote_code=True
    ),
    "deepseek_v2": Family(
        deepseek_v2,
        "DeepSeek-V2, V2-Lite",
        "latent attention, routed and shared experts",
        has_remote_code=True,
    ),
    "deepseek_v3": Family(
        deepseek_v3,
        "DeepSeek-V3, R1",
        "the same; experts in groups, by corrected sigmoids",
        has_remote_code=True,
    ),
    "deepseek_v32": Family(
        deepseek_v32,
        "DeepSeek-V3.2",
        "as `deepseek_v3`; attention to positions that an indexer selects",
    ),
    "glm4_moe_lite": Family(glm4_moe_lite, "GLM-4.7-Flash", "as `deepseek_v3`, without groups"),
    "glm_moe_dsa": Family(
        glm_moe_dsa,
        "GLM-5, 5.1",
        "as `deepseek_v32`, without groups; layers may share a selection",
    ),
    "kimi_k2": Family(
        deepseek_v3, "Kimi K2, K2 Thinking", "as `deepseek_v3`", has_remote_code=True
    ),
    "minicpm3": Family(
        minicpm3,
        "MiniCPM3 4B",
        "latent attention, three multipliers, LongRoPE",
        has_remote_code=True,
    ),
    "mistral4": Family(
        mistral4,
        "Mistral Small 4, text model only",
        "latent attention, queries that grow with position, routed and shared experts",
    ),
    "youtu": Family(youtu, "Youtu-LLM 2B", "latent attention", has_remote_code=True),
}
