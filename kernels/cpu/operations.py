"""The CPU kernels as one set (``kernels.operations.Operations``)."""

from kernels.cpu.drafts import accept_drafts
from kernels.cpu.experts import fused_moe, route
from kernels.cpu.feedback import feed_back
from kernels.cpu.inputs import build_inputs
from kernels.cpu.kv_store import copy_blocks, norm_rope, norm_rope_store
from kernels.cpu.latent import latent_rope_store
from kernels.cpu.layers import (
    activate,
    add_rms_norm,
    attention_temperatures,
    clamped_silu_mul,
    clamped_swiglu,
    erf_gelu_mul,
    gelu_mul,
    layer_norm,
    rms_norm,
    rope_tables,
    silu_mul,
    softcap,
    xielu,
)
from kernels.cpu.lora import add_adapters
from kernels.cpu.recurrent import (
    apply_gate,
    channel_scan,
    gated_conv,
    gated_delta,
    gated_rms_norm,
    selective_scan,
    short_conv,
)
from kernels.cpu.sampling import candidates, sample
from kernels.cpu.source import places_behind
from kernels.cpu.sparse import (
    index_rope_store,
    index_weights,
    select_slots,
    selected_lengths,
)
from kernels.reference.drafts import sample_from_probs, verify_drafts
from kernels.reference.lora import plan_adapters
from kernels.reference.moe import add_experts, add_gated, moe_token_thresholds
from kernels.reference.sampling_step import distribution

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
