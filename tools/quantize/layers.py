"""Quantises one layer: observes its inputs, rounds its weights, computes its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from engine.models.layouts import Layout
from engine.models.linear import Linear
from engine.models.modules import Layer, make_layer
from engine.quantization import choose_method
from tools.quantize.awq import CalibratedWeight, search_clip_ratios, search_scale
from tools.quantize.compressed import tensors_of
from tools.quantize.folds import apply_fold, folds_of
from tools.quantize.gptq import gptq
from tools.quantize.grid import Grid, QuantisedWeight, round_to_nearest
from tools.quantize.inputs import InputStats, ObservedLinear, output_error
from tools.quantize.recipe import Recipe
from tools.quantize.sites import Site, wrap_linears
from tools.quantize.source import CopyOnRead, Source, as_stored, stored_order

_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class QuantisedLayer:
    """A rounded layer.

    Attributes:
        weights: the dequantised parameters, float32.
        quantised: the codes of each site.
        errors: the error of each linear layer's output on the calibration text, as a share of its
            mean square.
    """

    weights: dict[str, torch.Tensor]
    quantised: dict[Site, QuantisedWeight]
    errors: dict[str, float]


class LayerQuantiser:
    """Rounds the layers of one model.

    Args:
        source: the checkpoint.
        recipe: how to round.
        grid: the levels to round to.
    """

    def __init__(self, source: Source, recipe: Recipe, grid: Grid) -> None:
        self._source = source
        self._recipe = recipe
        self._grid = grid
        self._method = choose_method(None, torch.float32, torch.device("cpu"))

    def read(self, i: int) -> dict[str, torch.Tensor]:
        """The parameters of layer ``i``, float32."""
        return {name: self._source.weights[name] for name in self._source.names(i)}

    def build_layer(self, i: int, weights: dict[str, torch.Tensor]) -> Layer:
        """Build the layer with these parameters."""
        return make_layer(self._source.spec, CopyOnRead(weights), self._method, i)

    def observe(self, i: int, layer: Layer) -> tuple[Layer, dict[str, InputStats]]:
        """The layer, and the statistics of each site's inputs, which fill as it runs."""
        stats = {
            site.label: InputStats(site.inputs, torch.device("cpu"))
            for site in self._source.sites(i, self._recipe)
        }

        def watch(label: str, linear: Linear) -> Linear:
            return ObservedLinear(linear, stats[label]) if label in stats else linear

        return wrap_linears(layer, watch), stats

    def quantise_layer(
        self, i: int, weights: dict[str, torch.Tensor], stats: dict[str, InputStats]
    ) -> QuantisedLayer:
        """Fold and round; ``weights`` are overwritten with their dequantised values."""
        sites = self._source.sites(i, self._recipe)
        if self._recipe.uses_awq:
            self._fold(i, sites, weights, stats)
        rounded: dict[Site, QuantisedWeight] = {}
        errors: dict[str, float] = {}
        for site in sites:
            rows = weights[site.parameter][site.begin : site.end]
            hessian = stats.pop(site.label).hessian
            rounded[site] = self._round(rows, hessian)
            value = rounded[site].dequantise()
            errors[site.label] = output_error(rows, value, hessian)
            rows.copy_(value)
        codes = {site.parameter for site in sites}
        for name, dtype in self._source.dtypes(i).items():
            if name not in codes:  # rounded to the file's dtype, after a fold
                weights[name] = weights[name].to(dtype).float()
        return QuantisedLayer(weights, rounded, errors)

    def with_quantised_inputs(self, layer: Layer) -> Layer:
        """The layer as it will be served: with rounded inputs if the scheme has them."""
        if not self._recipe.quantises_activations:
            return layer
        return wrap_linears(
            layer, lambda _, linear: QuantisedInputLinear(linear, self._grid.is_float)
        )

    def tensors(self, i: int, layer: QuantisedLayer) -> dict[str, torch.Tensor]:
        """The layer as stored in the file, by tensor names."""
        source, spec = self._source, self._source.spec
        found: dict[str, torch.Tensor] = {}
        in_codes: set[str] = set()
        for site, rounded in layer.quantised.items():
            for place in source.tensors_of(site):
                rows = source.parameters[site.parameter].rows(place.target.part)
                order = _rows_of(place.target.layout, source, rows.start - site.begin, rows)
                found |= tensors_of(place.module, rounded.rows(order), self._recipe)
                in_codes.add(place.entry.name)
        for name in source.names(i):
            for place in source.tensors[name]:
                if place.entry.name in in_codes:
                    continue
                part = layer.weights[name][source.parameters[name].rows(place.target.part)]
                stored = as_stored(place.target.layout, spec, part)
                stored = stored.to(place.entry.dtype).contiguous()
                found[place.entry.name] = stored.view(place.entry.shape)  # scalars have no shape
        return found

    def _fold(
        self,
        i: int,
        sites: list[Site],
        weights: dict[str, torch.Tensor],
        stats: dict[str, InputStats],
    ) -> None:
        spec, wanted = self._source.spec, self._source.parameters
        for fold in folds_of(spec, wanted, i, sites):
            readers = [
                CalibratedWeight(weights[site.parameter][site.begin : site.end], stats[site.label])
                for site in fold.consumers
            ]
            scale = search_scale(readers, self._grid, fold.average_tied)
            factor = apply_fold(fold, scale, weights, spec.norm.offset, self._source.dtypes(i))
            for site in fold.consumers:
                stats[site.label].scale(1 / factor)

    def _round(self, weight: torch.Tensor, hessian: torch.Tensor) -> QuantisedWeight:
        recipe, shrink = self._recipe, None
        if recipe.uses_awq:
            shrink = search_clip_ratios(weight, hessian, self._grid)
        if recipe.uses_gptq:
            return gptq(weight, hessian, self._grid, recipe.gptq, shrink)
        return round_to_nearest(weight, self._grid, shrink)


class QuantisedInputLinear:
    """A ``Linear`` whose inputs are rounded to eight bits per token."""

    def __init__(self, layer: Linear, is_float: bool) -> None:
        self._layer = layer
        self._is_float = is_float

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self._layer.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        most = torch.finfo(_FP8).max if self._is_float else 127.0
        scale = x.abs().amax(-1, keepdim=True).clamp_(min=1e-10) / most
        codes = x / scale
        return self._layer((codes.to(_FP8).float() if self._is_float else codes.round_()) * scale)


def stream_error(exact: torch.Tensor, rounded: torch.Tensor) -> tuple[float, float]:
    """The squared difference of two streams of one shape, and the squared length of the exact."""
    return float(functional.mse_loss(rounded, exact, reduction="sum")), float(exact.square().sum())


def layer_report(i: int, layer: QuantisedLayer, stream: float | None) -> dict[str, Any]:
    """The report on a layer.

    Args:
        i: its index.
        layer: the rounded layer.
        stream: the error of the held-out text's residual stream after it, against the unquantised
            model's, as a share of its mean square.
    """
    return {"layer": i, "stream_error": stream, "linear_errors": layer.errors}


def _rows_of(layout: Layout | None, source: Source, begin: int, rows: slice) -> torch.Tensor:
    return stored_order(layout, source.spec, rows.stop - rows.start) + begin
