"""How a quantised checkpoint stores a matrix: which tensors make it up, and how.

A dense checkpoint has one tensor for each place of the tables (``engine/models/tables.py``). In a
quantised one several tensors replace a matrix, such as ``X.qweight``, ``X.scales`` and ``X.qzeros``
for ``X.weight``. A ``QuantFormat`` knows them; matrices it does not claim are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from engine.errors import ModelLoadError
from engine.models.layouts import ScaledOutputs, Transposed
from engine.models.safetensors import Header, TensorEntry, read_tensor
from engine.models.spec import DecoderSpec
from engine.models.tables import Spec, TensorTables, layout_spec
from engine.models.weights import Target
from kernels.packed import PackedWeight


class ExpectedTensor(NamedTuple):
    """A tensor that a recipe needs."""

    name: str  # in full, as in the checkpoint of a whole model
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one matrix is made.

    Attributes:
        tensors: by their role in ``make``.
        make: makes the weight from these tensors, on the CPU. Raises ValueError if their values are
            not valid in the format.
        unused: names of tensors that belong to the matrix and are not needed here.
    """

    tensors: Mapping[str, ExpectedTensor]
    make: Callable[[Mapping[str, torch.Tensor]], PackedWeight]
    unused: tuple[str, ...] = ()


class QuantFormat(Protocol):
    """A way of storing quantised matrices, as described by ``quantization_config``."""

    @property
    def name(self) -> str:
        """Its name for users."""
        ...

    def recipe(
        self, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
    ) -> Recipe | None:
        """Return how the matrix is stored that a dense checkpoint calls ``name``.

        Args:
            name: such as ``model.layers.0.mlp.up_proj.weight``.
            shape: [outputs, inputs]; experts in one tensor are concatenated.
            present: all tensors of the checkpoint by their full names.

        Returns:
            None if it is dense.

        Raises:
            ModelLoadError: it is stored in a way that is not supported.
        """
        ...


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix of a checkpoint that is made by a recipe."""

    name: str
    target: Target
    recipe: Recipe
    sources: Mapping[str, tuple[Header, TensorEntry]]

    def read(self, spec: Spec) -> PackedWeight:
        """Read its tensors and make it, on the CPU.

        Raises:
            ModelLoadError: the file has become shorter, or the values are not valid in the format;
                one line that names file and tensor.
        """
        tensors = {}
        for role, (header, entry) in self.sources.items():
            with header.path.open("rb") as file:
                tensors[role] = read_tensor(file, entry)
        try:
            weight = self.recipe.make(tensors)
        except ValueError as error:
            raise ModelLoadError(f"{self.path}: '{self.name}': {error}") from None
        if self.target.layout is None:
            return weight
        return weight.select(_output_order(layout_spec(spec), self.target, weight.shape[0]))

    @property
    def path(self) -> Path:
        """The file with its first tensor."""
        return next(iter(self.sources.values()))[0].path


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """The packed matrices of a checkpoint, and the places that remain for dense ones.

    Attributes:
        matrices: by the parameters that they fill, in table order.
        targets: the remaining places of the tables.
        used_tensors: the checkpoint's tensors that are used, by their own names.
    """

    matrices: Mapping[str, tuple[PackedMatrix, ...]]
    targets: Mapping[str, Target]
    used_tensors: frozenset[str]

    @property
    def filled_targets(self) -> Iterator[Target]:
        """What they fill."""
        return (place.target for places in self.matrices.values() for place in places)


def find_packed(
    spec: Spec, headers: list[Header], tables: TensorTables, quant_format: QuantFormat | None
) -> PackedMatrices:
    """Ask the format for each matrix of the model.

    Raises:
        ModelLoadError: a tensor is missing, or its shape or dtype contradicts the config; one line
            that names the tensor and the file.
    """
    if quant_format is None:
        return PackedMatrices({}, tables.targets, frozenset())
    full_name = _full_names(tables)
    found = {
        full_name(entry.name): (header, entry)
        for header in headers
        for entry in header.entries.values()
    }
    present = {name: entry for name, (_, entry) in found.items()}
    # Modules of which any tensor exists: of several names for one module a checkpoint has one.
    modules = {name.rpartition(mark)[0] for name in present for mark in "._"}.union(present)
    places: dict[str, tuple[PackedMatrix, ...]] = {}
    left = dict(tables.targets)
    taken: set[str] = set()
    for name, target in tables.targets.items():
        shape = tables.parameters[target.parameter].part_shape(target.part)
        if len(shape) != 2 or name.removesuffix(".weight") not in modules:
            continue
        recipe = quant_format.recipe(name, (shape[0], shape[1]), present)
        if recipe is None:
            continue
        if isinstance(target.layout, Transposed):
            raise ModelLoadError(
                f"{headers[0].path.parent}: '{name}' is quantised, and layers that lie transposed "
                f"in {spec.architecture} models are supported dense only"
            )
        if isinstance(target.layout, ScaledOutputs):
            raise ModelLoadError(
                f"{headers[0].path.parent}: '{name}' is quantised; {spec.architecture} models are "
                "supported unquantised, or with --quantization"
            )
        sources = {
            role: _checked(expected, found, headers) for role, expected in recipe.tensors.items()
        }
        unused = [found[other][1].name for other in recipe.unused if other in found]
        taken |= {entry.name for _, entry in sources.values()} | set(unused)
        before = places.get(target.parameter, ())
        places[target.parameter] = (*before, PackedMatrix(name, target, recipe, sources))
        del left[name]
    return PackedMatrices(places, left, frozenset(taken))


def _checked(
    expected: ExpectedTensor, found: Mapping[str, tuple[Header, TensorEntry]], headers: list[Header]
) -> tuple[Header, TensorEntry]:
    if expected.name not in found:
        raise ModelLoadError(f"{headers[0].path.parent}: missing tensor '{expected.name}'")
    header, entry = found[expected.name]
    if entry.shape != expected.shape:
        raise ModelLoadError(
            f"{header.path}: tensor '{entry.name}' has shape {list(entry.shape)}, config.json asks "
            f"for {list(expected.shape)}"
        )
    if entry.dtype not in expected.dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
        given = str(entry.dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"{header.path}: tensor '{entry.name}' holds {given}, config.json asks for {wanted}"
        )
    return header, entry


def _full_names(tables: TensorTables) -> Callable[[str], str]:
    """Return ``TensorTables.full_name`` for tensors whose names share only a prefix with those of
    the tables."""
    modules = {name.removesuffix(".weight") for name in tables.targets}

    def full_name(name: str) -> str:
        return name if any(stem in modules for stem in _stems(name)) else tables.full_name(name)

    return full_name


def _stems(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _output_order(spec: DecoderSpec, target: Target, outputs: int) -> torch.Tensor:
    """Return where a matrix's outputs go under its layout, which is where its bias's would go."""
    assert target.layout is not None
    indices = torch.arange(outputs).view(target.layout.stored_shape(spec, (outputs,)))
    return target.layout.arrange(spec, indices)
