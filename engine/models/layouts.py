"""Checkpoint layouts of tensors that differ from the decoder's."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.models.recurrence import GatedDeltaSpec, MambaSpec
from engine.models.spec import DecoderSpec


class Layout(Protocol):
    """A checkpoint's own order of a parameter's numbers."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the checkpoint's shape of a tensor that has ``shape`` here."""
        ...

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the decoder's layout."""
        ...


class Transposed:
    """[inputs, outputs], as in GPT-2's layers."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape[::-1]

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        return stored.T


class QkvByKvHead:
    """The queries that share a key, that key and its value, then the next key's, and so on.

    Falcon fuses them this way, and so does GPT-NeoX, in which no heads share a key.
    """

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        group = spec.num_heads // spec.num_kv_heads
        heads = stored.unflatten(0, (spec.num_kv_heads, group + 2, spec.head_dim))
        parts = heads.split((group, 1, 1), dim=1)
        return torch.cat([part.flatten(0, 2) for part in parts])


class QkvByQuarter:
    """CodeGen's: a quarter of the heads' queries, their values and their keys, then the next."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        queries, values, keys = stored.unflatten(0, (4, 3, -1)).transpose(0, 1)
        return torch.cat([part.flatten(0, 1) for part in (queries, keys, values)])


class StackedExperts:
    """All experts of a layer in one tensor.

    Weights are [experts, inputs, outputs], biases [experts, outputs]. Llama 4 has an expert's gate
    before its up projection; GPT-OSS interleaves the outputs of both.

    Args:
        interleaved: even outputs are the gate's, odd ones the up projection's.
        outputs_first: weights are [experts, outputs, inputs], as in Granite.
    """

    def __init__(self, *, interleaved: bool = False, outputs_first: bool = False) -> None:
        self._interleaved = interleaved
        self._outputs_first = outputs_first

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        assert spec.moe is not None
        num_experts = spec.moe.num_experts
        if self._outputs_first:
            return (num_experts, shape[0] // num_experts, *shape[1:])
        return (num_experts, *shape[1:], shape[0] // num_experts)

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        has_order = stored.ndim == 2 or self._outputs_first
        experts = stored if has_order else stored.transpose(1, 2)  # [experts, outputs, ...]
        if self._interleaved:
            experts = experts.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return experts.flatten(0, 1)


class StackedExpertsByShape:
    """All experts of a layer in one tensor, inputs or outputs first (Qwen3-VL with experts).

    They were published with inputs first, and saved again with outputs first; the shape decides.
    """

    _inputs_first = StackedExperts()
    _outputs_first = StackedExperts(outputs_first=True)

    def layout_for(
        self, spec: DecoderSpec, shape: tuple[int, ...], stored: tuple[int, ...]
    ) -> Layout:
        """Return the layout of a tensor with ``shape`` here and ``stored`` in the checkpoint."""
        is_saved = stored == self._outputs_first.stored_shape(spec, shape)
        return self._outputs_first if is_saved else self._inputs_first

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``: as published."""
        return self._inputs_first.stored_shape(spec, shape)

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``: as published."""
        return self._inputs_first.arrange(spec, stored)


class QueriesAndGates:
    """A head's query and its gate, then the next head's, as in Qwen3-Next.

    The decoder has all gates first, so that queries and keys are adjacent.
    """

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        heads = stored.unflatten(0, (spec.num_heads, 2, spec.head_dim))
        return heads.transpose(0, 1).flip(0).flatten(0, 2)


class HeadGates:
    """One gate per head, [num_heads, inputs], as in LFM3. The decoder has an equal gate for each
    number of a head."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return (shape[0] // spec.head_dim, *shape[1:])

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        return stored.repeat_interleave(spec.head_dim, dim=0)


class ByKeyHead:
    """Several projections grouped by key head, as Qwen3-Next fuses them.

    Args:
        gates: betas and alphas; else queries, keys, values and output gates.
    """

    def __init__(self, *, gates: bool = False) -> None:
        self._gates = gates

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        delta = spec.recurrence
        assert isinstance(delta, GatedDeltaSpec)
        served = delta.num_value_heads // delta.num_key_heads
        values = served * delta.value_dim
        sizes = (served, served) if self._gates else (delta.key_dim, delta.key_dim, values, values)
        heads = stored.unflatten(0, (delta.num_key_heads, sum(sizes)))
        return torch.cat([part.flatten(0, 1) for part in heads.split(sizes, dim=1)])


class ScaledOutputs:
    """A weight whose outputs the model multiplies by factors of its config, which become part of it
    here.

    Args:
        name: of the factors in ``DecoderSpec.multipliers``: one for all outputs, or one for each
            run of a state space's first projection (gates, values, keys, queries, time steps).
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        factors = torch.tensor(dict(spec.multipliers)[self._name])
        if len(factors) > 1:
            assert isinstance(spec.recurrence, MambaSpec)
            inner, *mixed = spec.recurrence.inner_size, *spec.recurrence.conv_sizes
            runs = torch.tensor((inner, *mixed, spec.recurrence.num_heads))
            factors = factors.repeat_interleave(runs)
        factors = factors.view(-1, *(1,) * (stored.ndim - 1))
        return (stored.float() * factors).to(stored.dtype)


class NormedRows:
    """Embeddings that the model norms, without weights, before their first use (nanochat). Here
    they are normed at load."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        wide = stored.float()
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + spec.norm.eps)
        return (wide * inverse).to(stored.dtype)


class RowOffset:
    """A position table that starts at a later row, as OPT's starts at its third.

    Args:
        num_rows: unused rows before it.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return (shape[0] + self._num_rows, *shape[1:])

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        return stored[self._num_rows :]


class DepthwiseConv:
    """[channels, 1, width], the weight of a depthwise convolution."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return (shape[0], 1, *shape[1:])

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        return stored[:, 0]


class PerHead:
    """[1, 1, heads, 1], as Kimi Linear stores the rates of decay."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return (1, 1, *shape, 1)

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        return stored.flatten()


class OneOfRows:
    """[n], a row of a matrix, as StableLM stores the norms of its heads one by one."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return shape[1:]

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        return stored.unsqueeze(0)


class SingleRow:
    """[1, n], as ERNIE stores the routing correction bias."""

    def stored_shape(self, spec: DecoderSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Layout``."""
        return (1, *shape)

    def arrange(self, spec: DecoderSpec, stored: torch.Tensor) -> torch.Tensor:
        """See ``Layout``."""
        return stored[0]
