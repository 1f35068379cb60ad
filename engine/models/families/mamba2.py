"""Mamba-2: selective state spaces in all layers, without attention and MLPs (Dao & Gu 2024)."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.mamba import time_step_limit
from engine.models.families.shared import num_layers, read_dtype
from engine.models.recurrence import MambaSpec
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec

# A state has no length; this is the longest text that Codestral Mamba was tried with.
MAX_POSITIONS = 262_144
# Keys of initialisation and chunk sizes, and keys that Hugging Face's code does not read: the gate
# always comes before the norm. ``residual_in_fp32`` affects rounding only.
_UNUSED = (
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale"),
    *("time_step_init_scheme", "rescale_prenorm_residual", "chunk_size", "intermediate_size"),
    *("norm_before_gate", "residual_in_fp32"),
)


def mamba2(reader: ConfigReader) -> DecoderSpec:
    """Mamba-2 130M to 2.7B in Hugging Face's format, and Codestral Mamba."""
    for key in _UNUSED:
        reader.ignore(key)
    reader.require("hidden_act", "silu")
    reader.require("rms_norm", True)
    eps, hidden_size = reader.number("layer_norm_epsilon", 1e-5), reader.count("hidden_size", 4096)
    state_space = _state_space(reader, hidden_size, eps)
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size", 32_768),
        hidden_size=hidden_size,
        intermediate_size=state_space.inner_size,
        # No layer has such heads.
        num_heads=state_space.num_heads,
        num_kv_heads=state_space.num_heads,
        head_dim=state_space.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        norm=NormSpec(eps),
        rope=RopeSpec(10_000.0),  # None would be learned positions
        layers=(LayerSpec(recurrent=True, rope=False, mlp=False),) * num_layers(reader),
        recurrence=state_space,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


def _state_space(reader: ConfigReader, hidden_size: int, eps: float) -> MambaSpec:
    heads, groups = reader.count("num_heads", 128), reader.count("n_groups", 8)
    head_dim, inner = reader.count("head_dim", 64), reader.count("expand", 2) * hidden_size
    if heads * head_dim != inner:
        raise reader.error("num_heads", f"of {head_dim} make no width of {inner}")
    if heads % groups:
        raise reader.error("n_groups", f"must divide the {heads} heads")
    width = reader.count("conv_kernel", 4)
    if width < 2:
        raise reader.error("conv_kernel", "must be at least 2")
    return MambaSpec(
        num_heads=heads,
        num_groups=groups,
        head_dim=head_dim,
        state_size=reader.count("state_size", 128),
        conv_width=width,
        norm_eps=eps,
        conv_bias=reader.flag("use_conv_bias", True),
        bias=reader.flag("use_bias"),
        time_step_limit=time_step_limit(reader),
        heads_key="num_heads",
        groups_key="n_groups",
    )


FAMILIES: dict[str, Family] = {
    "mamba2": Family(
        mamba2,
        "Mamba-2 130M to 2.7B, Codestral Mamba 7B",
        "selective state spaces (Mamba-2) alone: no attention, no MLPs, no positions",
    ),
}
