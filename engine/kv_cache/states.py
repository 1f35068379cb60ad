"""Recurrent states: what layers without keys and values keep for each sequence.

A state has the same size whatever the length of the text. Each layer has a table of them, with one
line per slot of the runner's ``RowTable``; a step reads and overwrites a line in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.kv_cache.storage import zeros
from engine.limits import num_row_lines
from engine.models.layer_state import LayerState
from engine.models.spec import DecoderSpec


def num_state_lines(config: EngineConfig, num_states: int, num_snapshots: int) -> int:
    """Lines in each layer's table: for rows, one for padding, and for snapshots."""
    return num_row_lines(config, num_states) + 1 + num_snapshots


def make_states(
    spec: DecoderSpec, num_lines: int, dtype: torch.dtype, device: torch.device
) -> tuple[LayerState, ...]:
    """Allocate the zeroed states of all recurrent layers; ``dtype`` is the model's.

    On a CPU a line takes memory when it is first written.

    Raises:
        ModelLoadError: the device has too little memory.
    """
    recurrence = spec.recurrence
    if recurrence is None:
        return ()
    inputs = (num_lines, recurrence.conv_width - 1, recurrence.channels)
    sums = recurrence.ssm_state_shape
    try:
        return tuple(
            LayerState(
                zeros(inputs, dtype, device),
                None if sums is None else zeros((num_lines, *sums), torch.float32, device),
            )
            for layer in spec.layers
            if layer.has_recurrence
        )
    except (RuntimeError, MemoryError) as error:
        size = num_lines * spec.state_bytes(dtype.itemsize)
        reason = str(error).splitlines()[0]
        raise ModelLoadError(
            f"the states of {num_lines} sequences, {size / 2**20:,.0f} MiB, do not fit {device}: "
            f"{reason}"
        ) from None


def copy_states(states: Sequence[LayerState], pairs: Iterable[tuple[int, int]]) -> None:
    """Copy lines (source, target) in every layer, in order. Does not wait for the device."""
    tensors = [tensor for layer in states for tensor in layer.tensors()]
    for source, target in pairs:
        for tensor in tensors:
            tensor[target].copy_(tensor[source])
