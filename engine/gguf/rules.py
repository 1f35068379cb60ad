"""GGUF names of a decoder's parameters: one table for all architectures."""

from __future__ import annotations

from engine.models.rules import Rule
from engine.models.spec import DecoderSpec

_LAYER = "blk.{i}."
_MODEL = (
    Rule("token_embd.weight", "embedding"),
    Rule("position_embd.weight", "positions"),
    Rule("output_norm.weight", "norm"),
    Rule("output_norm.bias", "norm.bias"),
    Rule("output.weight", "head"),
)
_NORMS = tuple(
    Rule(f"{_LAYER}{name}.{kind}", "{i}." + ours + ("" if kind == "weight" else ".bias"))
    for name, ours in (
        ("attn_norm", "attention_norm"),
        ("post_attention_norm", "attention_after"),
        ("ffn_norm", "mlp_norm"),
        ("post_ffw_norm", "mlp_after"),
        ("attn_q_norm", "query_norm"),
        ("attn_k_norm", "key_norm"),
    )
    for kind in ("weight", "bias")
)
_EXPERTS = (
    Rule(_LAYER + "ffn_gate_inp.weight", "{i}.router"),
    Rule(_LAYER + "ffn_gate.{e}.weight", "{i}.experts.gate_up", 0, None, 2),
    Rule(_LAYER + "ffn_up.{e}.weight", "{i}.experts.gate_up", 1, None, 2),
    Rule(_LAYER + "ffn_down.{e}.weight", "{i}.experts.down"),
    Rule(_LAYER + "ffn_gate_shexp.weight", "{i}.shared.gate_up.weight", 0),
    Rule(_LAYER + "ffn_up_shexp.weight", "{i}.shared.gate_up.weight", 1),
    Rule(_LAYER + "ffn_down_shexp.weight", "{i}.shared.down.weight"),
    Rule(_LAYER + "ffn_gate_inp_shexp.weight", "{i}.shared.gate"),
)
# Tensors that are part of the config.
CONFIG_TENSORS = frozenset(
    ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
)
# Tensors of all experts of a layer, and older files' names with one tensor per expert.
STACKED = {f"ffn_{name}_exps.weight": f"ffn_{name}.{{e}}.weight" for name in ("gate", "up", "down")}


def rules_of(spec: DecoderSpec, names: set[str]) -> tuple[Rule, ...]:
    """Return the table for a model with these tensor names: projections may be fused."""
    qkv = (("attn_q", 0), ("attn_k", 1), ("attn_v", 2))
    if "blk.0.attn_qkv.weight" in names:
        qkv = (("attn_qkv", None),)
    gate_up = (("ffn_up", 0),)
    if spec.gated:
        gate_up = (("ffn_up", None),)
        if any(name.endswith(".ffn_gate.weight") for name in names):
            gate_up = (("ffn_gate", 0), ("ffn_up", 1))
    parts = {
        "qkv": qkv,
        "output": (("attn_output", 0),),
        "gate_up": gate_up,
        "down": (("ffn_down", 0),),
    }
    layers = (
        Rule(f"{_LAYER}{name}.{kind}", f"{{i}}.{parameter}.{kind}", part)
        for parameter, named in parts.items()
        for name, part in named
        for kind in ("weight", "bias")
    )
    return (*_MODEL, *_NORMS, *layers, *_EXPERTS)
