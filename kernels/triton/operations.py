"""The Triton kernels as one set (``kernels.operations.Operations``)."""

from kernels.reference.fused import erf_gelu_mul
from kernels.reference.layers import activate, attention_temperatures, layer_norm, softcap
from kernels.reference.sampling_step import candidates
from kernels.reference.source import places_behind
from kernels.reference.sparse import selected_lengths
from kernels.triton.channel_scan_chunks import channel_scan
from kernels.triton.delta_chunks import gated_delta
from kernels.triton.distribution import distribution
from kernels.triton.drafts import accept_drafts, sample_from_probs, verify_drafts
from kernels.triton.feedback import feed_back
from kernels.triton.gates import add_gated, apply_gate, gated_rms_norm
from kernels.triton.inputs import build_inputs
from kernels.triton.kv_store import copy_blocks, norm_rope_store
from kernels.triton.latent import latent_rope_store
from kernels.triton.layers import (
    add_rms_norm,
    clamped_silu_mul,
    clamped_swiglu,
    gelu_mul,
    norm_rope,
    rms_norm,
    rope_tables,
    silu_mul,
    xielu,
)
from kernels.triton.lora import add_adapters, plan_adapters
from kernels.triton.moe import add_experts, fused_moe
from kernels.triton.routing import moe_token_thresholds, route
from kernels.triton.sampling import sample
from kernels.triton.scan_chunks import selective_scan
from kernels.triton.short_conv import gated_conv, short_conv
from kernels.triton.sparse import index_rope_store, index_weights, select_slots

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
