"""The checkpoint to quantise: its layers' parameters, and the parameter of each of its tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.models.checkpoint import fingerprint, read_config, read_headers
from engine.models.expert_rows import split_experts
from engine.models.json_file import parse_object, read_bytes
from engine.models.layouts import Layout
from engine.models.loader import Weights, load_weights
from engine.models.safetensors import Header, TensorEntry
from engine.models.spec import DecoderSpec
from engine.models.tables import tables_of
from engine.models.weights import Parameter, Target
from tools.quantize.files import TensorLocation
from tools.quantize.recipe import QuantizeError, Recipe
from tools.quantize.sites import Site, sites_of


class CheckpointTensor(NamedTuple):
    """A tensor of the checkpoint, and the parameter that it is part of."""

    header: Header
    entry: TensorEntry
    target: Target

    @property
    def module(self) -> str:
        """The module whose weight it is."""
        return self.entry.name.removesuffix(".weight")


class Source:
    """An unquantised checkpoint of a decoder.

    Raises:
        QuantizeError: it is already quantised, an encoder, or has unsupported layers.
        ModelLoadError: it is missing, damaged or not supported.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "config.json"
        self.config: dict[str, Any] = parse_object(path, read_bytes(path)) if path.is_file() else {}
        quantization = self.config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise QuantizeError(f"{path}: the model is quantised already ({method or 'unnamed'})")
        model = read_config(str(directory))
        if not isinstance(model.spec, DecoderSpec):
            raise QuantizeError(f"{path}: {model.spec.architecture} is an encoder; decoders only")
        self.spec = model.spec
        if self.spec.is_recurrent:
            raise QuantizeError(
                f"{path}: {self.spec.architecture} models keep a state in some layers, which are "
                "not rounded here; quire serve --quantization rounds them as they load"
            )
        streams = self.spec.altup is not None
        if self.spec.has_heterogeneous_layers or self.spec.layer_scales or streams:
            raise QuantizeError(
                f"{path}: layers of {self.spec.architecture} models have heads unlike other "
                "layers', which are not rounded here; quire serve --quantization rounds them as "
                "they load"
            )
        if not self.spec.norm.has_weight:
            raise QuantizeError(
                f"{path}: norms of {self.spec.architecture} models have no weights, which rounding "
                "needs; quire serve --quantization rounds them as they load"
            )
        if self.spec.norm_gate_rank or any(layer.experts_aside for layer in self.spec.layers):
            raise QuantizeError(
                f"{path}: norms of {self.spec.architecture} models are read by gates or by experts "
                "aside, which rounding would have to scale, too; quire serve --quantization rounds "
                "them as they load"
            )
        self.headers = read_headers(directory)
        tables = tables_of(self.spec)
        moe = self.spec.moe
        if moe and split_experts(self.headers, tables.targets, moe.num_experts) != self.headers:
            raise QuantizeError(
                f"{directory}: {self.spec.architecture} models store a layer's experts in one "
                "tensor, which quantised files have no word for; quire serve --quantization rounds "
                "them as they load"
            )
        self.parameters: dict[str, Parameter] = tables.parameters
        self.weights: Weights = load_weights(
            self.spec, self.headers, torch.float32, torch.device("cpu")
        )
        self.tensors: dict[str, list[CheckpointTensor]] = {}
        for header in self.headers:
            for entry in header.entries.values():
                target = tables.targets.get(tables.full_name(entry.name))
                if target is not None and target.parameter in self.parameters:
                    place = CheckpointTensor(header, entry, target)
                    self.tensors.setdefault(target.parameter, []).append(place)
        self.fingerprint = fingerprint(model, self.headers)

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(entry.num_bytes for header in self.headers for entry in header.entries.values())

    def names(self, i: int) -> list[str]:
        """The parameters of layer ``i``."""
        return [name for name in self.parameters if name.startswith(f"{i}.")]

    def dtypes(self, i: int) -> dict[str, torch.dtype]:
        """The dtypes in which layer ``i``'s parameters are stored."""
        return {name: self.tensors[name][0].entry.dtype for name in self.names(i)}

    def sites(self, i: int, recipe: Recipe) -> list[Site]:
        """The linear layers of layer ``i`` that will be rounded.

        Raises:
            QuantizeError: a part of one is to be ignored, or its layout in the file has no
                equivalent in compressed-tensors.
        """
        return [
            site
            for site in sites_of(self.spec, self.parameters, i)
            if self._is_quantised(site, recipe)
        ]

    def tensors_outside_layers(self) -> list[TensorLocation]:
        """The tensors outside the layers, by their locations in the files."""
        return [
            TensorLocation(e.name, e.dtype, e.shape, place.header.path, e.begin, e.num_bytes)
            for name, places in self.tensors.items()
            if not name.partition(".")[0].isdigit()
            for place in places
            for e in (place.entry,)
        ]

    def ignored(self, recipe: Recipe) -> list[str]:
        """The linear modules that are not rounded."""
        rounded = {
            place.entry.name
            for i in range(self.spec.num_layers)
            for site in self.sites(i, recipe)
            for place in self.tensors_of(site)
        }
        kept = [
            place.module
            for name, places in self.tensors.items()
            if name not in ("embedding", "positions") and len(self.parameters[name].shape) == 2
            for place in places
            if place.entry.name not in rounded and place.entry.name.endswith(".weight")
        ]
        # A tied head has no tensor, but is a module all the same.
        return list(dict.fromkeys((*kept, "lm_head")))

    def _is_quantised(self, site: Site, recipe: Recipe) -> bool:
        places = self.tensors_of(site)
        ignored = [recipe.ignores(place.module) for place in places]
        if any(ignored):
            if not all(ignored):
                names = ", ".join(place.module for place in places)
                raise QuantizeError(
                    f"--ignore must take all of {names}, or none: they are one layer"
                )
            return False
        for place in places:
            if place.target.layout is not None and not _has_whole_rows(
                place.target.layout, self.spec
            ):
                raise QuantizeError(
                    f"{place.entry.name}: {self.spec.architecture} stores it in an order that "
                    "quantised files have no word for"
                )
        return True

    def tensors_of(self, site: Site) -> list[CheckpointTensor]:
        """The tensors that make up a linear layer."""
        parameter = self.parameters[site.parameter]
        return [
            place
            for place in self.tensors[site.parameter]
            if (rows := parameter.rows(place.target.part)).start < site.end
            and rows.stop > site.begin
        ]


class CopyOnRead(Mapping[str, torch.Tensor]):
    """A mapping of parameters that returns a copy on each read, so that readers may modify it."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def stored_order(layout: Layout | None, spec: DecoderSpec, rows: int) -> torch.Tensor:
    """The parameter's output for each row of the file, [rows]."""
    order = torch.arange(rows)
    if layout is None:
        return order
    return layout.arrange(spec, order.unsqueeze(1)).flatten().argsort()


def as_stored(layout: Layout | None, spec: DecoderSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter's part in the order of the file."""
    if layout is None:
        return tensor
    shape = layout.stored_shape(spec, tuple(tensor.shape))
    places = layout.arrange(spec, torch.arange(tensor.numel()).view(shape)).flatten()
    stored = torch.empty_like(tensor).flatten()
    stored[places] = tensor.flatten()
    return stored.view(shape)


def digest(*parts: object) -> str:
    """A short hash of ``parts``."""
    text = json.dumps([str(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _has_whole_rows(layout: Layout, spec: DecoderSpec) -> bool:
    """Whether the file has the parameter's outputs as whole rows, in whatever order."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return layout.stored_shape(spec, (heads, 3)) == (heads, 3) and spec.moe is None
