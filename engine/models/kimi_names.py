"""Checkpoints' parameter names for Kimi Linear and Ling 3."""

from __future__ import annotations

from engine.models.layouts import DepthwiseConv, PerHead
from engine.models.mixture_names import CORRECTED
from engine.models.rules import LAYER, LLAMA, Rule, expert_rules

_OWN = LAYER + "self_attn."
_EXPERTS = LAYER + "block_sparse_moe."
# A layer has either latent attention or a delta rule, whose projections share some names.
KIMI_LINEAR = (
    *(rule for rule in LLAMA if ".self_attn." not in rule.pattern),
    Rule(_OWN + "q_proj.weight", "{i}.qkv.weight", 0),
    Rule(_OWN + "kv_a_proj_with_mqa.weight", "{i}.qkv.weight", 1),
    Rule(_OWN + "kv_a_layernorm.weight", "{i}.latent_norm"),
    Rule(_OWN + "kv_b_proj.weight", "{i}.latent_up"),
    Rule(_OWN + "o_proj.weight", "{i}.output.weight"),
    *(
        Rule(f"{_OWN}{name}_proj.weight", "{i}.recurrent.input.weight", part)
        for part, name in enumerate("qkv")
    ),
    *(
        Rule(f"{_OWN}{name}_conv1d.weight", "{i}.recurrent.conv.weight", part, DepthwiseConv())
        for part, name in enumerate("qkv")
    ),
    Rule(_OWN + "b_proj.weight", "{i}.recurrent.gates.weight"),
    Rule(_OWN + "f_a_proj.weight", "{i}.recurrent.ranked.weight", 0),
    Rule(_OWN + "g_a_proj.weight", "{i}.recurrent.ranked.weight", 1),
    Rule(_OWN + "f_b_proj.weight", "{i}.recurrent.decays.weight"),
    Rule(_OWN + "g_b_proj.weight", "{i}.recurrent.output_gates.weight"),
    Rule(_OWN + "A_log", "{i}.recurrent.log_a", 0, PerHead()),
    Rule(_OWN + "dt_bias", "{i}.recurrent.dt_bias"),
    Rule(_OWN + "o_norm.weight", "{i}.recurrent.norm"),
    Rule(_OWN + "o_proj.weight", "{i}.recurrent.output.weight"),
    # The dense layer's MLP in files that Hugging Face saved.
    Rule(_EXPERTS + "gate_proj.weight", "{i}.gate_up.weight", 0),
    Rule(_EXPERTS + "up_proj.weight", "{i}.gate_up.weight", 1),
    Rule(_EXPERTS + "down_proj.weight", "{i}.down.weight"),
    Rule(_EXPERTS + "gate.weight", "{i}.router"),
    Rule(_EXPERTS + "gate.e_score_correction_bias", "{i}.router.correction"),
    *expert_rules(_EXPERTS + "experts.{e}.", "w1", "w3", "w2"),
    Rule(_EXPERTS + "shared_experts.gate_proj.weight", "{i}.shared.gate_up.weight", 0),
    Rule(_EXPERTS + "shared_experts.up_proj.weight", "{i}.shared.gate_up.weight", 1),
    Rule(_EXPERTS + "shared_experts.down_proj.weight", "{i}.shared.down.weight"),
)


def _ling_attention(own: str) -> tuple[Rule, ...]:
    """Rules of what a layer's tokens are mixed by. As in Kimi Linear, some names are shared."""
    return (
        *(
            Rule(f"{own}{name}.weight", "{i}.qkv.weight", part)
            for part, name in enumerate(("g_proj", "q_proj", "kv_a_proj_with_mqa"))
        ),
        Rule(own + "kv_a_layernorm.weight", "{i}.latent_norm"),
        Rule(own + "kv_b_proj.weight", "{i}.latent_up"),
        *(
            Rule(f"{own}{name}_proj.weight", "{i}.recurrent.input.weight", part)
            for part, name in enumerate("qkvg")
        ),
        *(
            Rule(f"{own}{name}_conv1d.weight", "{i}.recurrent.conv.weight", part, DepthwiseConv())
            for part, name in enumerate("qkv")
        ),
        *(
            Rule(f"{own}{name}_proj.weight", "{i}.recurrent.gates.weight", part)
            for part, name in enumerate("bf")
        ),
        Rule(own + "A_log", "{i}.recurrent.log_a"),
        Rule(own + "dt_bias", "{i}.recurrent.dt_bias"),
        Rule(own + "o_norm.weight", "{i}.recurrent.norm"),
        # Published, attention has the first name and the delta rule the second. Hugging Face saves
        # both under the first, and has them in memory under the second.
        *(
            Rule(f"{own}{name}.weight", f"{{i}}.{part}output.weight")
            for name in ("dense", "o_proj")
            for part in ("", "recurrent.")
        ),
    )


LING3 = (
    *(
        rule
        for rule in LLAMA
        if ".self_attn." not in rule.pattern and rule.parameter != "embedding"
    ),
    *CORRECTED,
    Rule("model.word_embeddings.weight", "embedding"),
    Rule(LAYER + "mlp.gate.expert_bias", "{i}.router.correction"),
    *_ling_attention(LAYER + "attention."),
    *_ling_attention(LAYER + "self_attn."),  # in Hugging Face's memory, and so in adapters
)
