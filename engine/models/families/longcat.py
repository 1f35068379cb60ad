"""LongCat-Flash: in its checkpoints, a layer is two, with experts that skip the second one.

    checkpoint:  x ─► attention ─► norm ─┬─► MLP ─► attention ─► norm ─► MLP ─┬─► x
                                         └──────────── experts ───────────────┘

Here it is two layers. Experts read what the first one's MLP reads, and their result is added after
the second one (Cai et al. 2024, arXiv 2404.05019, shortcut-connected experts). Some experts return
what they read.
"""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import read_latent_decoder
from engine.models.families.family import Family
from engine.models.families.shared import num_layers, set_aliases, with_checked_experts
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec

_ALIASES = {
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts",
}


def longcat_flash(reader: ConfigReader) -> DecoderSpec:
    """LongCat-Flash (Meituan 2025): DeepSeek-V3's attention, with factors of latents."""
    set_aliases(reader, _ALIASES)
    _require_published(reader)
    count = _num_layers(reader)
    reader.set_defaults({"q_lora_rank": 1536, "rms_norm_eps": 1e-5})
    reader.ignore("head_dim")  # the rotary dimensions
    spec = read_latent_decoder(
        reader, None, interleaved=True, max_positions=131_072, theta=10_000_000.0
    )
    latent = spec.latent
    assert latent is not None
    if latent.query_rank is None:
        raise reader.error("q_lora_rank", "is absent")
    assert spec.attention_scale is not None
    halves = tuple(
        LayerSpec(experts_aside=half == 0, checkpoint_layers=(i, half))
        for i in range(count)
        for half in (0, 1)
    )
    spec = dataclasses.replace(
        spec,
        layers=halves,
        moe=_experts(reader),
        latent=dataclasses.replace(latent, scale=(spec.hidden_size / latent.rank) ** 0.5),
        attention_scale=spec.attention_scale * (spec.hidden_size / latent.query_rank) ** 0.5,
        naming="",
        num_draft_layers=0,  # in the files they are named otherwise
    )
    return with_checked_experts(reader, spec)


def _require_published(reader: ConfigReader) -> None:
    """Require what all published models have, where the config says it at all."""
    if not reader.has_value("attention_method", "mla"):
        reader.require("attention_method", "MLA")
    reader.require("zero_expert_type", "identity")
    for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        reader.require(key, True)
    for key in ("router_bias", "norm_topk_prob"):
        reader.require(key, False)


def _num_layers(reader: ConfigReader) -> int:
    """Return the number of layers as the checkpoint counts them; a config may also have their
    halves, or their own number in place of that."""
    if "num_layers" not in reader:
        count = num_layers(reader)
        if count % 2:
            raise reader.error("num_hidden_layers", "is odd: it counts halves of layers")
        return count // 2
    count = num_layers(reader, "num_layers")
    reader.set_defaults({"num_hidden_layers": 2 * count})
    if reader.count("num_hidden_layers") not in (count, 2 * count):
        raise reader.error("num_hidden_layers", f"does not go with {count} layers")
    return count


def _experts(reader: ConfigReader) -> MoeSpec:
    return MoeSpec(
        num_experts=reader.count("n_routed_experts"),
        top_k=reader.count("num_experts_per_tok"),
        intermediate_size=reader.count("moe_intermediate_size"),
        normalised=False,
        scale=reader.number("routed_scaling_factor", 6.0),
        num_identity_experts=reader.non_negative("zero_expert_num", 256),
        has_correction_bias=True,
        router_in_float32=True,
        width_key="expert_ffn_hidden_size",
    )


FAMILIES: dict[str, Family] = {
    "longcat_flash": Family(
        longcat_flash,
        "LongCat-Flash Chat and Thinking",
        "latent attention twice in a layer, experts that skip half of it, some of which do nothing",
        has_remote_code=True,
    ),
}
