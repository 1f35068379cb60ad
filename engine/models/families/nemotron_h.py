"""Nemotron-H: in its checkpoints, mixers (Mamba-2, attention), MLPs and experts are separate
layers.

    checkpoint:  M   -   M   *   E   M        M: state space, *: attention, -: MLP, E: experts
    here:       [M   -] [M] [*   E] [M]

An MLP or mixture of experts is joined to the mixer before it, so that the layer is like those of
other models. A mixer that is followed by another one becomes a layer without an MLP.
"""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import read_deepseek_v3_experts
from engine.models.families.family import Family
from engine.models.families.mamba import read_state_space
from engine.models.families.shared import read_activation, read_decoder, with_checked_experts
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

# The letters of ``hybrid_override_pattern``, and Hugging Face's current and former names.
_KINDS = {
    **{"M": "state", "linear_attention": "state", "mamba": "state"},
    **{"*": "attention", "full_attention": "attention", "attention": "attention"},
    **{"-": "mlp", "mlp": "mlp"},
    **{"E": "experts", "moe": "experts"},
}
_LISTS = ("layers_block_type", "layer_types")
_MAX_LAYERS = 10_000
# Keys of initialisation, chunk sizes, draft layers, and a duplicate of the norms' eps. NVIDIA's own
# code limits time steps by ``time_step_limit``; Hugging Face's clamps them to ``time_step_min``.
_UNUSED = (
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "chunk_size"),
    *("rescale_prenorm_residual", "expand", "num_logits_to_keep", "use_mamba_kernels"),
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("mamba_ssm_cache_dtype", "rms_norm_eps", "norm_eps", "output_router_logits"),
    "moe_shared_expert_overlap",
)
# Expert keys that are also written without experts.
_EXPERT_KEYS = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_latent_size"),
    *("moe_shared_expert_intermediate_size", "num_experts_per_tok", "routed_scaling_factor"),
    *("n_group", "topk_group", "norm_topk_prob"),
)


def nemotron_h(reader: ConfigReader) -> DecoderSpec:
    """Nemotron-H, Nemotron Nano 2 and 3: no position embedding, squared ReLU without gates."""
    for key in _UNUSED:
        reader.ignore(key)
    reader.require("mamba_hidden_act", "silu")
    for key in ("residual_in_fp32", "attention_bias", "mamba_proj_bias"):
        reader.require(key, False)
    reader.refuse("sliding_window", "is set, which is not supported")
    eps, layers = reader.number("layer_norm_epsilon", 1e-5), _layers(reader)
    moe = _experts(reader) if any(layer.experts for layer in layers) else None
    spec = read_decoder(
        reader,
        norm=NormSpec(eps),
        head_dim=reader.count("attention_head_dim", 128),
        max_positions=4096,
        intermediate_size=21_504,
        activation=read_activation(reader, "mlp_hidden_act", "relu2", gated=False),
        gated=False,
        mlp_bias=reader.flag("mlp_bias"),
        layers=layers,
        moe=moe,
        recurrence=read_state_space(
            reader,
            eps,
            heads_key="mamba_num_heads",
            head_dim_key="mamba_head_dim",
            state_key="ssm_state_size",
        ),
    )
    if moe is not None:
        return with_checked_experts(reader, spec)
    for key in _EXPERT_KEYS:
        reader.ignore(key)
    return spec


def _experts(reader: ConfigReader) -> MoeSpec:
    """Read experts like DeepSeek-V3's, and a shared expert with its own width."""
    reader.require("n_shared_experts", 1)
    reader.require("mlp_bias", False)
    return dataclasses.replace(
        read_deepseek_v3_experts(reader),
        latent_size=reader.optional_count("moe_latent_size") or 0,
        shared_intermediate_size=reader.count("moe_shared_expert_intermediate_size", 7688),
        shared_width_key="moe_shared_expert_intermediate_size",
    )


def _layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return the mixers, each with the MLP after it."""
    layers: list[LayerSpec] = []
    mixer: int | None = None  # the previous one, if it has no MLP yet
    key, kinds = _kinds(reader)
    for i, kind in enumerate(kinds):
        if kind in ("state", "attention"):
            mixer = i
            layers.append(
                LayerSpec(
                    recurrent=kind == "state", rope=False, mlp=False, checkpoint_layers=(i, i)
                )
            )
            continue
        if mixer is None:
            raise reader.error(key, f"has no mixer before MLP {i}, which is not supported")
        layers[-1] = dataclasses.replace(
            layers[-1], mlp=True, experts=kind == "experts", checkpoint_layers=(mixer, i)
        )
        mixer = None
    attending = [layer for layer in layers if not layer.recurrent]
    if not attending or len(attending) == len(layers):
        what = "attention" if not attending else "state space"
        raise reader.error(key, f"has no {what}, which is not supported")
    return tuple(layers)


def _kinds(reader: ConfigReader) -> tuple[str, list[str]]:
    """Return the kind of each checkpoint layer, and the key it was read from."""
    pattern: list[str] = list(reader.text("hybrid_override_pattern", ""))
    key, given = "hybrid_override_pattern", pattern
    for name in _LISTS:
        if name in reader:
            key, given = name, reader.texts(name)
    unknown = [kind for kind in given if kind not in _KINDS]
    if unknown:
        raise reader.error(key, f"has {unknown[0]!r:.80}, which is not supported")
    if not 0 < len(given) < _MAX_LAYERS:
        raise reader.error(key, "must say what each layer is")
    if reader.count("num_hidden_layers", len(given)) != len(given):
        raise reader.error("num_hidden_layers", f"differs from the {len(given)} of '{key}'")
    return key, [_KINDS[kind] for kind in given]


FAMILIES: dict[str, Family] = {
    "nemotron_h": Family(
        nemotron_h,
        "Nemotron-H 8B to 56B, Nemotron Nano 2 9B and 12B, Nemotron 3 Nano and Super",
        "selective state spaces (Mamba-2), attention without rope and MLPs as layers of their own, "
        "ungated MLP with squared ReLU; experts as in DeepSeek-V3 in some, of latents in Super",
        has_remote_code=True,
    ),
}
