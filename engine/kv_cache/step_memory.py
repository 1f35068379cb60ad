"""What a step needs of a GPU's memory besides weights and cache."""

from __future__ import annotations

import torch

from engine.config import SchedulerConfig
from engine.limits import MAX_CAPTURED_TOKENS
from engine.models.recurrence import ChannelScanSpec, GatedDeltaSpec, RecurrenceSpec
from engine.models.spec import DecoderSpec, MoeSpec
from kernels.recurrent import CHUNK, max_chunks
from kernels.tiled import MAX_WIDENED_BYTES


def step_bytes(
    spec: DecoderSpec, limits: SchedulerConfig, dtype: torch.dtype, *, has_codes: bool
) -> int:
    """Upper estimate of the memory for one step's tensors.

    Args:
        spec: the model, or a rank's share of it.
        limits: of a step, on its device.
        dtype: of the model.
        has_codes: matrices are quantised, and widened in memory for many tokens.
    """
    # Logits and copies of them made by sampling, in float32.
    needed = 6 * 4 * spec.vocab_size * limits.max_num_seqs
    # For steps that are launched, and in the memory of captured ones.
    for num_tokens in (limits.step_tokens, min(limits.step_tokens, MAX_CAPTURED_TOKENS)):
        needed += _token_bytes(spec, dtype) * num_tokens
        chunks = max_chunks(num_tokens, limits.max_num_seqs)
        needed += torch.float32.itemsize * _chunk_floats(spec.recurrence) * chunks
        if has_codes:
            needed += _widened_bytes(spec, dtype)
    return needed


def _token_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    per_layer = 3 * spec.num_remaining_layers * spec.per_layer_size
    numbers = 3 * spec.hidden_size + 2 * _widest(spec) + per_layer
    if spec.altup is not None:
        numbers += 4 * spec.altup.num_streams * spec.hidden_size
    if spec.moe is not None:
        # Both products of each of its experts, and what the activation makes of the first.
        of_an_expert = 3 * spec.moe.intermediate_size + _experts_width(spec, spec.moe)
        numbers += spec.moe.top_k * of_an_expert
    if spec.recurrence is not None:
        numbers += 4 * spec.recurrence.channels
    return numbers * dtype.itemsize


def _chunk_floats(recurrence: RecurrenceSpec | None) -> int:
    """Upper estimate of what kernels keep of a chunk of a prompt, to apply it to a state."""
    if isinstance(recurrence, ChannelScanSpec):
        return (recurrence.state_size + 1) * recurrence.channels
    if not isinstance(recurrence, GatedDeltaSpec):
        return 0
    # A token's products with its chunk, and the inverse that yields its update.
    a_token = 2 * CHUNK + 4
    if recurrence.decays_channels:
        # Its keys and its query with their decays, these products, and its update of no state.
        keys = 1 << (recurrence.key_dim - 1).bit_length()
        a_token = 3 * keys + CHUNK + recurrence.value_dim + 4
    return CHUNK * recurrence.num_value_heads * a_token


def _widened_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """The largest matrices widened at a time: a layer's, the head, or those of its experts."""
    largest = max(_widest(spec), spec.vocab_size) * spec.hidden_size
    if (moe := spec.moe) is not None:
        an_expert = 2 * moe.intermediate_size * _experts_width(spec, moe)
        largest = max(largest, moe.num_local_experts * an_expert)
    return min(largest * dtype.itemsize, MAX_WIDENED_BYTES)


def _widest(spec: DecoderSpec) -> int:
    """The most outputs of a matrix of a layer, experts apart."""
    layers = [spec.for_layer(layer) for layer in set(spec.layers)]
    return max(max(2 * o.intermediate_size, o.query_size + 2 * o.kv_size) for o in layers)


def _experts_width(spec: DecoderSpec, moe: MoeSpec) -> int:
    return moe.latent_size or spec.hidden_size
