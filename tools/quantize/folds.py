"""Where a scale of inputs can be folded into the operation that produces them.

    norm * w          ─►  qkv, gate and up         the norm's weight is divided
    value             ─►  attention's output       the rows of the value projection are
    act(gate) * up    ─►  down                     the rows of the up projection are

The model's output stays the same. Weights that read the same inputs and are not rounded, such as a
router's, are multiplied as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from engine.models.spec import DecoderSpec
from engine.models.weights import Parameter
from tools.quantize.sites import Site

_LayerWeights = dict[str, torch.Tensor]


class Fold(NamedTuple):
    """One place where a scale can be folded."""

    norm: str | None  # the norm parameter that is divided, or
    rows: tuple[str, int, int] | None  # the outputs [begin, end) of a linear layer that are
    consumers: tuple[Site, ...]  # layers with these inputs that will be rounded
    unquantised_consumers: tuple[
        str, ...
    ] = ()  # parameters with these inputs that will not be rounded
    repeats: tuple[int, int] = (1, 1)  # query heads per key-value head, and head size

    def average_tied(self, magnitude: torch.Tensor) -> torch.Tensor:
        """Magnitudes of inputs [inputs], averaged over those produced by the same output."""
        times, size = self.repeats
        if times == 1:
            return magnitude
        heads = magnitude.view(-1, times, size)
        return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)

    def to_source(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale of each output of the source: [inputs] -> [outputs]."""
        times, size = self.repeats
        return scale if times == 1 else scale.view(-1, times, size)[:, 0].reshape(-1)

    def to_inputs(self, scale: torch.Tensor) -> torch.Tensor:
        """The inverse mapping: [outputs] -> [inputs]."""
        times, size = self.repeats
        if times == 1:
            return scale
        heads = scale.view(-1, 1, size)
        return heads.expand(-1, times, size).reshape(-1)


def folds_of(
    spec: DecoderSpec, wanted: dict[str, Parameter], i: int, sites: list[Site]
) -> Iterator[Fold]:
    """The folds of layer ``i``; ``sites`` are the layers that will be rounded."""
    by_label = {site.label: site for site in sites}
    first = [site for site in sites if site.label.endswith("gate_up")]
    beside = tuple(name for name in (f"{i}.router", f"{i}.shared.gate") if name in wanted)
    # An indexer reads what the first projection reads.
    indexer = (f"{i}.index.key.weight", f"{i}.index.weights")
    beside_attention = tuple(name for name in indexer if name in wanted)
    attention = [by_label["qkv"]] if "qkv" in by_label else []
    complete = len(first) == _num_norm_consumers(spec, i)
    if spec.has_input_norms(spec.layers[i]):
        if spec.shared_norm:
            if attention and complete:
                yield Fold(f"{i}.attention_norm", None, (*attention, *first), beside)
        else:
            if attention:
                yield Fold(f"{i}.attention_norm", None, tuple(attention), beside_attention)
            if complete:
                yield Fold(f"{i}.mlp_norm", None, tuple(first), beside)
    if "output" in by_label and spec.latent is None:
        projection = wanted[f"{i}.qkv.weight"]
        rows = projection.rows(len(projection.parts) - 1)  # gates of their own may come first
        repeats = (spec.num_heads // spec.num_kv_heads, spec.head_dim)
        value = (f"{i}.qkv.weight", rows.start, rows.stop)
        yield Fold(None, value, (by_label["output"],), repeats=repeats)
    if spec.gated and isinstance(spec.activation, str):  # a clamp is not linear in ``up``
        for site in sites:
            if site.label.endswith("down"):
                yield Fold(None, _up_rows(wanted, site), (site,))


def apply_fold(
    fold: Fold,
    scale: torch.Tensor,
    weights: _LayerWeights,
    offset: float,
    dtypes: dict[str, torch.dtype],
) -> torch.Tensor:
    """Divide the source by ``scale`` and multiply its readers, in place.

    A norm's weight is rounded to its dtype in the file. The readers are multiplied by the factor it
    was actually divided by, so that this rounding causes no error.

    Args:
        fold: the place.
        scale: [inputs].
        weights: the layer's parameters, float32.
        offset: what the model adds to a norm's weights.
        dtypes: the dtypes of parameters in the file.

    Returns:
        [inputs], the factors that the readers' columns were multiplied by.
    """
    divisor = fold.to_source(scale)
    if fold.norm is not None:
        old = weights[fold.norm] + offset
        new = ((old / divisor) - offset).to(dtypes[fold.norm]).float()
        kept = (new + offset == 0) | (old == 0)
        divisor = torch.where(kept, torch.ones_like(old), old / (new + offset))
        weights[fold.norm] = torch.where(kept, weights[fold.norm], new)
        bias = weights.get(f"{fold.norm}.bias")
        if bias is not None:
            bias /= divisor
    else:
        assert fold.rows is not None
        name, begin, end = fold.rows
        weights[name][begin:end] /= divisor.unsqueeze(1)
        bias = weights.get(f"{name.removesuffix('.weight')}.bias")
        if bias is not None:
            bias[begin:end] /= divisor
    factor = fold.to_inputs(divisor)
    for site in fold.consumers:
        weights[site.parameter][site.begin : site.end] *= factor
    for name in fold.unquantised_consumers:
        weights[name] *= factor
    return factor


def _num_norm_consumers(spec: DecoderSpec, i: int) -> int:
    """The number of linear layers that read the MLP's norm, not counting the router."""
    if not (spec.layers[i].experts and spec.moe):
        return 1
    return spec.moe.num_experts + (spec.moe.shared_intermediate_size > 0)


def _up_rows(wanted: dict[str, Parameter], down: Site) -> tuple[str, int, int]:
    """The outputs of the up projection that ``down`` reads."""
    name = down.parameter.replace("down", "gate_up")
    expert = down.begin // (down.end - down.begin)
    rows = wanted[name].rows(2 * expert + 1)
    return name, rows.start, rows.stop
