"""The parameters of a model in a GGUF file, each read on access.

Quantised matrices stay codes if the linear method has a kernel for their type; everything else is
widened while it is read, some MiB at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.client import LoadProgress
from engine.errors import ModelLoadError
from engine.gguf.blocks import FORMATS, unpack_rows
from engine.gguf.config import architecture_of
from engine.gguf.file import GgufFile, GgufTensor
from engine.gguf.rules import CONFIG_TENSORS, STACKED, rules_of
from engine.models.linear import Weight
from engine.models.loader import Cuts, Weights, is_on_rank
from engine.models.parallel_reader import ParallelReader
from engine.models.spec import DecoderSpec
from engine.models.weights import Parameter, Target, parameters, targets
from engine.parallel.shard import local_parameters
from engine.parallel.weight_slicing import slice_dense, slice_packed
from kernels.cpu.memory import mapped_zeros
from kernels.packed import PackedParts, PackedWeight

logger = logging.getLogger(__name__)

_STAGING_BYTES = 8 * 2**20
_DENSE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class _PlacedTensor(NamedTuple):
    """A tensor of the file, and where its rows go."""

    tensor: GgufTensor
    target: Target
    order: torch.Tensor | None  # [rows] int64: the row here of each of the file's


class GgufWeights(Weights):
    """All parameters of a model.

    Args:
        file: its tables.
        spec: of the model.
        dtype: of dense parameters.
        device: of all parameters.
        on_progress: called after each parameter.
        packed: tensor types whose matrices stay codes.
        cuts: a rank's part of each parameter; tensors are read whole nevertheless.

    Raises:
        ModelLoadError: a tensor has no place, a place has no tensor, or a shape differs; nothing
            has been read then. One line that names the tensor and the file.
    """

    def __init__(
        self,
        file: GgufFile,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: LoadProgress | None = None,
        *,
        packed: Collection[str] = (),
        cuts: Cuts | None = None,
    ) -> None:
        wanted = parameters(spec)
        own = wanted if cuts is None else local_parameters(cuts)
        super().__init__(own, dtype, device, on_progress)
        self._cuts = cuts or {}
        self._readers = ParallelReader()
        self._packed = frozenset(packed) & FORMATS.keys()
        self._places: dict[str, list[_PlacedTensor]] = {}
        for place in _assign(file, spec, wanted):
            if is_on_rank(self._cuts, place.target):
                self._places.setdefault(place.target.parameter, []).append(place)
        matrices = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
        widened = matrices - self._packed - _DENSE.keys()
        if self._packed and widened:
            logger.info("weights in %s are widened to %s", ", ".join(sorted(widened)), dtype)

    def load_matrix(self, name: str) -> Weight:
        """See ``Weights.load_matrix``."""
        places = self._places[name]
        if not any(place.tensor.type.name in self._packed for place in places):
            return self[name]
        parameter = self._wanted[name]
        parts: list[PackedWeight | torch.Tensor] = []
        for place in sorted(places, key=lambda place: place.target.part or 0):
            if place.tensor.type.name in self._packed:
                parts.append(self._read_packed(name, place))
            else:
                own = parameter.part_shape(place.target.part)[0]
                part = self._empty(replace(parameter, parts=(own,)))
                self._read_shard(name, place, part)
                parts.append(part)
        self._report_progress(math.prod(parameter.shape), _progress_label(places))
        return PackedParts(tuple(parts))

    def _fill(self, name: str, parameter: Parameter, tensor: torch.Tensor) -> str:
        places = self._places[name]
        if name in self._cuts and self._cuts[name].is_zero:
            tensor.zero_()
            return _progress_label(places)
        for place in places:
            self._read_shard(name, place, tensor[parameter.rows(place.target.part)])
        return _progress_label(places)

    def _read_shard(self, name: str, place: _PlacedTensor, into: torch.Tensor) -> None:
        """Widen the tensor, or the rank's part of it, into a new tensor."""
        cut, part = self._cuts.get(name), place.target.part
        if cut is None:
            self._read_dense(place, into)
            return
        whole = mapped_zeros(cut.full.part_shape(part), into.dtype)
        self._read_dense(place, whole)
        slice_dense(whole, cut.for_part(part), None, into)

    def _read_dense(self, place: _PlacedTensor, into: torch.Tensor) -> None:
        """Widen the tensor's rows into those of ``into``."""
        tensor = place.tensor
        dense = _DENSE.get(tensor.type.name)
        if dense is not None and place.order is None:
            self._readers.fill(tensor.path, tensor.begin, dense, into)
            return
        into = into.view(into.shape[0], -1)
        rows, width = into.shape
        for begin, raw in _pieces(tensor, rows):
            values = _dequantize(tensor, raw).view(-1, width)
            own = slice(begin, begin + len(values))
            if place.order is None:
                into[own] = values.to(into.device, into.dtype)
            else:
                into[place.order[own].to(into.device)] = values.to(into.device, into.dtype)

    def _read_packed(self, name: str, place: _PlacedTensor) -> PackedWeight:
        """Read the tensor as codes, or the rank's part of it, on the device."""
        weight, cut = self._read_codes(place), self._cuts.get(name)
        if cut is not None:
            try:
                weight = slice_packed(weight, cut, place.target.part)
            except ValueError as error:
                tensor = place.tensor
                raise ModelLoadError(
                    f"{tensor.path}: '{tensor.name}' cannot be shared out to ranks: {error}"
                ) from None
        return weight if self._device.type == "cpu" else weight.to(self._device)

    def _read_codes(self, place: _PlacedTensor) -> PackedWeight:
        """Read the tensor's rows as codes, on the CPU. An unpacked piece is little larger than
        in the file."""
        tensor = place.tensor
        kind, rows = FORMATS[tensor.type.name], tensor.shape[0]
        whole: PackedWeight | None = None
        for begin, raw in _pieces(tensor, rows):
            piece = unpack_rows(kind, raw, tensor.type.num_bytes)
            whole = whole or _empty_like(piece, rows)
            own: slice | torch.Tensor = slice(begin, begin + len(raw))
            if place.order is not None:
                own = place.order[own]
            whole.codes[own], whole.scales[own] = piece.codes, piece.scales
            if whole.zeros is not None and piece.zeros is not None:
                whole.zeros[own] = piece.zeros
        assert whole is not None  # no matrix is without rows
        return whole


def _progress_label(places: list[_PlacedTensor]) -> str:
    return f"loading {places[-1].tensor.path.name}"


def _empty_like(piece: PackedWeight, rows: int) -> PackedWeight:
    """Allocate a weight of ``rows`` outputs in the form of ``piece``."""

    def room(part: torch.Tensor) -> torch.Tensor:
        return mapped_zeros((rows, *part.shape[1:]), part.dtype)

    zeros = None if piece.zeros is None else room(piece.zeros)
    return replace(piece, codes=room(piece.codes), scales=room(piece.scales), zeros=zeros)


def _pieces(tensor: GgufTensor, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield some rows at a time, with the number of the first: [n, bytes of a row] uint8."""
    row_bytes = tensor.num_bytes // rows
    step = max(1, _STAGING_BYTES // max(row_bytes, 1))
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        for begin in range(0, rows, step):
            raw = mapped_zeros((min(step, rows - begin), row_bytes), torch.uint8)
            if file.readinto(raw.numpy().data) != raw.numel():
                raise ModelLoadError(f"{tensor.path}: '{tensor.name}' is cut short")
            yield begin, raw


def _dequantize(tensor: GgufTensor, raw: torch.Tensor) -> torch.Tensor:
    """Widen rows: [n, inputs] in a float dtype."""
    dense = _DENSE.get(tensor.type.name)
    if dense is not None:
        return raw.view(dense)
    kind = FORMATS.get(tensor.type.name)
    if kind is not None:
        return unpack_rows(kind, raw, tensor.type.num_bytes).dequantise(torch.float32)
    import gguf  # slow to import; only for rare types

    number = gguf.GGMLQuantizationType[tensor.type.name]
    return torch.from_numpy(gguf.dequantize(raw.numpy(), number))


# ---------------------------------------------------------------- places


def _assign(
    file: GgufFile, spec: DecoderSpec, wanted: dict[str, Parameter]
) -> Iterator[_PlacedTensor]:
    """Yield every tensor with its place; leftovers and gaps are errors."""
    tensors = {tensor.name: tensor for tensor in _split_experts(file)}
    places = targets(spec, wanted, rules_of(spec, set(tensors)))
    in_pairs = architecture_of(file).rope_interleaved
    for name, tensor in tensors.items():
        target = places.pop(name, None)
        if target is None:
            if name in CONFIG_TENSORS:
                continue
            raise ModelLoadError(
                f"{tensor.path}: tensor {name[:80]!r} has no place in a {file.architecture} model "
                "with this metadata"
            )
        parameter = wanted[target.parameter]
        shape = parameter.part_shape(target.part)
        if _without_ones(tensor.shape) != _without_ones(shape):
            raise ModelLoadError(
                f"{tensor.path}: tensor '{name}' has shape {list(tensor.shape)}, the metadata asks "
                f"for {list(shape)}"
            )
        order = None
        if in_pairs and ".qkv." in target.parameter and target.part in (0, 1):
            order = _interleaved_row_order(shape[0], spec.head_dim)
        yield _PlacedTensor(tensor, target, order)
    if places:
        names = ", ".join(f"'{name}'" for name in sorted(places)[:4])
        raise ModelLoadError(f"{file.path}: missing tensors ({len(places)}): {names}")


def _split_experts(file: GgufFile) -> Iterator[GgufTensor]:
    """Yield the tensors, with stacked experts split into one tensor each."""
    for tensor in file.tensors.values():
        stem, _, rest = tensor.name.partition("ffn_")
        each = STACKED.get("ffn_" + rest)
        if each is None or len(tensor.shape) != 3:
            yield tensor
            continue
        count, *shape = tensor.shape
        size = tensor.num_bytes // max(count, 1)
        for e in range(count):
            yield replace(
                tensor,
                name=stem + each.replace("{e}", str(e)),
                shape=tuple(shape),
                begin=tensor.begin + e * size,
                num_bytes=size,
            )


def _interleaved_row_order(rows: int, head_dim: int) -> torch.Tensor:
    """Return the new place of each query or key row.

    llama.cpp rotates adjacent dimensions in models with the first Llama's layout, and its files
    have their rows in that order.
    """
    halves = torch.arange(rows).unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten()


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
