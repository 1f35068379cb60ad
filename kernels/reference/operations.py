"""The reference kernels as one module (``kernels.operations.Operations``)."""

from kernels.reference.drafts import accept_drafts, sample_from_probs, verify_drafts
from kernels.reference.feedback import feed_back
from kernels.reference.fused import (
    add_rms_norm,
    erf_gelu_mul,
    gelu_mul,
    latent_rope_store,
    norm_rope,
    norm_rope_store,
)
from kernels.reference.inputs import build_inputs
from kernels.reference.kv_store import copy_blocks
from kernels.reference.layers import (
    activate,
    attention_temperatures,
    layer_norm,
    rms_norm,
    rope_tables,
    silu_mul,
    softcap,
    xielu,
)
from kernels.reference.lora import add_adapters, plan_adapters
from kernels.reference.moe import (
    add_experts,
    add_gated,
    clamped_silu_mul,
    clamped_swiglu,
    fused_moe,
    moe_token_thresholds,
    route,
)
from kernels.reference.recurrent import (
    apply_gate,
    channel_scan,
    gated_conv,
    gated_delta,
    gated_rms_norm,
    selective_scan,
    short_conv,
)
from kernels.reference.sampling_step import candidates, distribution, sample
from kernels.reference.source import places_behind
from kernels.reference.sparse import (
    index_rope_store,
    index_weights,
    select_slots,
    selected_lengths,
)

__all__ = [
    "accept_drafts",
    "activate",
    "add_adapters",
    "add_experts",
    "add_gated",
    "add_rms_norm",
    "apply_gate",
    "attention_temperatures",
    "build_inputs",
    "candidates",
    "channel_scan",
    "clamped_silu_mul",
    "clamped_swiglu",
    "copy_blocks",
    "distribution",
    "erf_gelu_mul",
    "feed_back",
    "fused_moe",
    "gated_conv",
    "gated_delta",
    "gated_rms_norm",
    "gelu_mul",
    "index_rope_store",
    "index_weights",
    "latent_rope_store",
    "layer_norm",
    "moe_token_thresholds",
    "norm_rope",
    "norm_rope_store",
    "places_behind",
    "plan_adapters",
    "rms_norm",
    "rope_tables",
    "route",
    "sample",
    "sample_from_probs",
    "select_slots",
    "selected_lengths",
    "selective_scan",
    "short_conv",
    "silu_mul",
    "softcap",
    "verify_drafts",
    "xielu",
]
