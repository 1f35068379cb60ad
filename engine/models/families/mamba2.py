"""Mamba-2: selective state spaces in all layers, without attention and MLPs (Dao & Gu 2024)."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.mamba import read_state_space
from engine.models.families.shared import num_layers, read_dtype
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
    state_space = read_state_space(
        reader,
        eps,
        heads_key="num_heads",
        head_dim_key="head_dim",
        state_key="state_size",
        inner=reader.count("expand", 2) * hidden_size,
    )
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


FAMILIES: dict[str, Family] = {
    "mamba2": Family(
        mamba2,
        "Mamba-2 130M to 2.7B, Codestral Mamba 7B",
        "selective state spaces (Mamba-2) alone: no attention, no MLPs, no positions",
    ),
}
