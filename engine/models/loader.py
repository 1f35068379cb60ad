"""Fill a model's parameters from checkpoints, or with noise for benchmarks."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping

import torch

from engine.client import LoadProgress
from engine.errors import ModelLoadError
from engine.models.expert_rows import split_experts
from engine.models.layouts import Layout, StackedExpertsByShape
from engine.models.linear import Weight
from engine.models.packed_tensors import PackedMatrices, PackedMatrix, QuantFormat, find_packed
from engine.models.parallel_reader import ParallelReader, read_ahead
from engine.models.safetensors import Header, TensorEntry
from engine.models.spec import DecoderSpec
from engine.models.tables import Spec, TensorTables, layout_spec, tables_of
from engine.models.weights import Parameter, Target
from engine.parallel.shard import ParameterSlice, local_parameters
from engine.parallel.weight_slicing import slice_dense, slice_packed
from kernels.cpu.memory import mapped_zeros
from kernels.packed import PackedParts, PackedWeight

_PREFETCH_BYTES = 128 * 2**20
_DUMMY_STD = 0.02
# A prime, so that no matrix has a period that divides its rows.
_DUMMY_POOL = 1_048_573

Cuts = Mapping[str, ParameterSlice]  # a rank's part of each parameter


class Weights(Mapping[str, torch.Tensor]):
    """The parameters of a model by name, each read on access and not kept."""

    def __init__(
        self,
        wanted: dict[str, Parameter],
        dtype: torch.dtype,
        device: torch.device,
        on_progress: LoadProgress | None,
    ) -> None:
        self._wanted = wanted
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._total = _num_elements(wanted) or 1
        self._done = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self._wanted[name]
        tensor = self._empty(parameter)
        label = self._fill(name, parameter, tensor)
        self._report_progress(tensor.numel(), label)
        return tensor

    def load_matrix(self, name: str) -> Weight:
        """Return a matrix to make a layer from: packed if the checkpoint has codes.

        ``self[name]`` would widen them.
        """
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    @abstractmethod
    def _fill(self, name: str, parameter: Parameter, tensor: torch.Tensor) -> str:
        """Write a parameter's values; return a label for progress reports."""

    def _report_progress(self, num_elements: int, told: str) -> None:
        self._done += num_elements
        if self._on_progress is not None:
            self._on_progress(min(1.0, self._done / self._total), told)

    def _empty(self, parameter: Parameter) -> torch.Tensor:
        dtype = torch.float32 if parameter.is_float32 else self._dtype
        try:
            if self._device.type == "cpu":
                return mapped_zeros(parameter.shape, dtype)
            return torch.empty(parameter.shape, dtype=dtype, device=self._device)
        except (RuntimeError, OSError) as error:  # their only common base class
            size = self._total * self._dtype.itemsize
            reason = str(error).splitlines()[0]
            raise ModelLoadError(
                f"the weights need {size / 2**20:,.0f} MiB, which {self._device} does not have: "
                f"{reason}"
            ) from None


class _CheckpointWeights(Weights):
    def __init__(
        self,
        spec: Spec,
        headers: list[Header],
        dtype: torch.dtype,
        device: torch.device,
        on_progress: LoadProgress | None,
        quant_format: QuantFormat | None,
        cuts: Cuts | None,
    ) -> None:
        tables = tables_of(spec)
        wanted = tables.parameters if cuts is None else local_parameters(cuts)
        super().__init__(wanted, dtype, device, on_progress)
        self._cuts = cuts or {}
        self._spec = spec
        if isinstance(spec, DecoderSpec) and spec.moe is not None:
            headers = split_experts(headers, tables.targets, spec.moe.num_experts)
        packed = find_packed(spec, headers, tables, quant_format)
        self._packed = {
            name: [place for place in places if is_on_rank(self._cuts, place.target)]
            for name, places in packed.matrices.items()
        }
        self._places: dict[str, list[tuple[Header, TensorEntry, Target]]] = {}
        for header, entry, target in _assign(spec, headers, tables, packed):
            if is_on_rank(self._cuts, target):
                self._places.setdefault(target.parameter, []).append((header, entry, target))
        self._readers = ParallelReader()
        self._prefetcher = _Prefetcher(self._places)

    def load_matrix(self, name: str) -> Weight:
        """See ``Weights.load_matrix``."""
        packed = self._packed.get(name)
        if packed is None:
            return self[name]
        parameter = self._wanted[name]
        parts: dict[int, PackedWeight | torch.Tensor] = {
            place.target.part or 0: self._read_packed(name, place).to(self._device)
            for place in packed
        }
        if name in self._places:  # mixed: a dense tensor for all, of which the dense parts are kept
            whole = self._empty(parameter)
            self._fill_dense(name, parameter, whole)
            for _, _, target in self._places[name]:
                parts[target.part or 0] = whole[parameter.rows(target.part)]
        self._report_progress(math.prod(parameter.shape), f"loading {packed[0].path.name}")
        return PackedParts(tuple(parts[part] for part in sorted(parts)))

    def _fill(self, name: str, parameter: Parameter, tensor: torch.Tensor) -> str:
        if name in self._cuts and self._cuts[name].is_zero:
            tensor.zero_()
            return ""
        if parameter.is_one:
            tensor.fill_(1.0)
            return ""
        label = self._fill_dense(name, parameter, tensor)
        for place in self._packed.get(name, ()):
            part = tensor[parameter.rows(place.target.part)]
            part.copy_(self._read_packed(name, place).dequantise(self._dtype))
            label = f"loading {place.path.name}"
        return label

    def _fill_dense(self, name: str, parameter: Parameter, tensor: torch.Tensor) -> str:
        told, cut = "", self._cuts.get(name)
        self._prefetcher.prefetch(name)
        for header, entry, target in self._places.get(name, ()):
            part = tensor[parameter.rows(target.part)]  # contiguous: parts are along dimension 0
            if cut is not None:
                self._fill_cut(cut, header, entry, target, tensor)
            elif target.layout is None:
                self._readers.fill(header.path, entry.begin, entry.dtype, part)
            else:
                part.copy_(self._read_arranged(header, entry, target.layout, tensor.dtype))
            told = f"loading {header.path.name}"
        return told

    def _fill_cut(
        self,
        cut: ParameterSlice,
        header: Header,
        entry: TensorEntry,
        target: Target,
        tensor: torch.Tensor,
    ) -> None:
        """Read the rank's part of a tensor in the file into its rows of ``tensor``."""
        columns = cut.columns
        if target.layout is not None:
            whole = self._read_arranged(header, entry, target.layout, tensor.dtype)
            slice_dense(whole, cut, target.part, tensor)
            return
        row_bytes = entry.num_bytes // (entry.shape or (1,))[0]
        for rows, own in cut.row_ranges(target.part):
            begin = entry.begin + rows.start * row_bytes
            if columns is None:
                self._readers.fill(header.path, begin, entry.dtype, tensor[own])
            else:
                begin += columns.start * entry.dtype.itemsize
                self._readers.fill_columns(header.path, begin, row_bytes, entry.dtype, tensor[own])

    def _read_arranged(
        self, header: Header, entry: TensorEntry, layout: Layout, dtype: torch.dtype
    ) -> torch.Tensor:
        """Read a whole tensor and arrange it as the decoder has it."""
        stored = torch.empty(entry.shape, dtype=dtype, device=self._device)
        self._readers.fill(header.path, entry.begin, entry.dtype, stored)
        return layout.arrange(layout_spec(self._spec), stored)

    def _read_packed(self, name: str, place: PackedMatrix) -> PackedWeight:
        """Read a packed matrix, or the rank's part of it, on the CPU."""
        weight, cut = place.read(self._spec), self._cuts.get(name)
        if cut is None:
            return weight
        try:
            return slice_packed(weight, cut, place.target.part)
        except ValueError as error:
            raise ModelLoadError(
                f"{place.path}: '{place.name}' cannot be shared out to ranks: {error}"
            ) from None


class _Prefetcher:
    """Asks the system to read the next parts of the files while a layer is made from earlier ones.

    Parameters are accessed in about the order of the tables.
    """

    def __init__(self, places: Mapping[str, list[tuple[Header, TensorEntry, Target]]]) -> None:
        self._places = places
        self._names = list(places)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._num_requested = 0  # names before it have been requested

    def prefetch(self, name: str) -> None:
        """Request ``name``, which is read now, and the following parameters up to a fixed size."""
        begin = self._index.get(name)
        if begin is None:
            return
        left = _PREFETCH_BYTES
        for index in range(begin, len(self._names)):
            entries = self._places[self._names[index]]
            left -= sum(entry.num_bytes for _, entry, _ in entries)
            if left < 0 and index > begin:
                return
            if index >= self._num_requested:
                for header, entry, _ in entries:
                    read_ahead(header.path, entry.begin, entry.num_bytes)
                self._num_requested = index + 1


class _DummyWeights(Weights):
    def __init__(
        self,
        spec: Spec,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        on_progress: LoadProgress | None,
        cuts: Cuts | None,
    ) -> None:
        wanted = tables_of(spec).parameters if cuts is None else local_parameters(cuts)
        super().__init__(wanted, dtype, device, on_progress)
        self._zeros = {name for name, cut in (cuts or {}).items() if cut.is_zero}
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randn(_DUMMY_POOL, generator=generator).mul_(_DUMMY_STD)
        self._pool = pool.to(device=device, dtype=dtype)

    def _fill(self, name: str, parameter: Parameter, tensor: torch.Tensor) -> str:
        if parameter.is_norm or name in self._zeros:
            tensor.fill_(float(parameter.is_norm))
        else:
            digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
            _tile(tensor.view(-1), self._pool, int.from_bytes(digest, "little") % _DUMMY_POOL)
        return "making random weights"


def is_on_rank(cuts: Cuts, target: Target) -> bool:
    """Return whether a rank has a part of what fills ``target``; without cuts it has everything."""
    if not cuts:
        return True
    cut = cuts.get(target.parameter)
    return cut is not None and cut.has(target.part)


def load_matrix(weights: Mapping[str, torch.Tensor], name: str) -> Weight:
    """See ``Weights.load_matrix``; dense from any other mapping."""
    return weights.load_matrix(name) if isinstance(weights, Weights) else weights[name]


def load_weights(
    spec: Spec,
    headers: list[Header],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: LoadProgress | None = None,
    quant_format: QuantFormat | None = None,
    cuts: Cuts | None = None,
) -> Weights:
    """Read all parameters of a model from a checkpoint's files, cast to ``dtype``.

    With ``cuts``, only one rank's shard of each is read. Matrices quantised in the format
    ``quant_format`` stay quantised when they are read by ``load_matrix``.

    Raises:
        ModelLoadError: a tensor has no place, a place has no tensor, or a shape differs; nothing
            has been read then. One line that names the tensor and the file.
    """
    return _CheckpointWeights(spec, headers, dtype, device, on_progress, quant_format, cuts)


def dummy_weights(
    spec: Spec,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    on_progress: LoadProgress | None = None,
    cuts: Cuts | None = None,
) -> Weights:
    """Make random parameters from the config alone: normal(0, 0.02), and ones for norms.

    With ``cuts``, the shapes are those of one rank's shard. A pool of a million variates is tiled
    over each parameter, starting at a different offset for each: gigabytes at the speed of a copy,
    and deterministic in the seed.
    """
    return _DummyWeights(spec, dtype, device, seed, on_progress, cuts)


def num_parameters(spec: Spec) -> int:
    """Return the model's number of trained parameters."""
    wanted = tables_of(spec).parameters
    return _num_elements({name: wanted[name] for name in wanted if not wanted[name].is_one})


def weights_bytes(spec: Spec, dtype: torch.dtype) -> int:
    """Return the parameters' size in memory when held in ``dtype``."""
    return num_parameters(spec) * dtype.itemsize


def _assign(
    spec: Spec, headers: list[Header], tables: TensorTables, packed: PackedMatrices
) -> Iterator[tuple[Header, TensorEntry, Target]]:
    """Yield every dense tensor with its place, in file order; leftovers and gaps are errors."""
    wanted, places = tables.parameters, packed.targets
    filled = {(target.parameter, target.part) for target in packed.filled_targets}
    for header in headers:
        for entry in sorted(header.entries.values(), key=lambda entry: entry.begin):
            if entry.name in packed.used_tensors:
                continue
            name = tables.full_name(entry.name)
            target = places.get(name)
            if target is None and tables.is_skippable(name):
                continue
            if target is None or (target.parameter, target.part) in filled:
                raise ModelLoadError(
                    f"{header.path}: tensor {entry.name[:80]!r} has no place in a "
                    f"{spec.architecture} model with this config.json, or appears twice"
                )
            filled.add((target.parameter, target.part))
            shape = wanted[target.parameter].part_shape(target.part)
            if target.layout is not None:
                layout, decoder = target.layout, layout_spec(spec)
                if isinstance(layout, StackedExpertsByShape):
                    layout = layout.layout_for(decoder, shape, entry.shape)
                    target = target._replace(layout=layout)
                shape = layout.stored_shape(decoder, shape)
            if (entry.shape or (1,)) != shape:  # scalars have no dimensions
                raise ModelLoadError(
                    f"{header.path}: tensor '{entry.name}' has shape {list(entry.shape)}, "
                    f"config.json asks for {list(shape)}"
                )
            if not entry.dtype.is_floating_point or entry.dtype.itemsize == 1:
                raise ModelLoadError(
                    f"{header.path}: tensor '{entry.name}' is not of 16-bit or wider floats, and "
                    "config.json names no quantisation format that it belongs to"
                )
            yield header, entry, target
    missing = [name for name, target in places.items() if not _is_filled(target, filled)]
    if missing:
        names = ", ".join(f"'{name}'" for name in sorted(missing)[:4])
        directory = headers[0].path.parent
        raise ModelLoadError(f"{directory}: missing tensors ({len(missing)}): {names}")


def _is_filled(target: Target, filled: Collection[tuple[str, int | None]]) -> bool:
    """Return whether the tensor, or another with the same contents, is present.

    Of several names for one tensor a checkpoint has one; experts may be in one tensor or one each.
    """
    parameter, part = target.parameter, target.part
    if part is not None:
        return (parameter, part) in filled or (parameter, None) in filled
    return any(other == parameter for other, _ in filled)


def _num_elements(wanted: dict[str, Parameter]) -> int:
    return sum(math.prod(parameter.shape) for parameter in wanted.values())


def _tile(flat: torch.Tensor, pool: torch.Tensor, offset: int) -> None:
    """Tile the pool over ``flat``, starting at ``offset``."""
    done = 0
    while done < flat.numel():
        piece = pool[offset : offset + flat.numel() - done]
        flat[done : done + piece.numel()].copy_(piece)
        done += piece.numel()
        offset = 0
