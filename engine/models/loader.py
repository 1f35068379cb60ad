"""Fills a decoder's parameters: from safetensors, or with noise for measurements."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import groupby

import torch

from engine.client import LoadProgress
from engine.errors import ModelLoadError
from engine.models.safetensors import Header, TensorEntry, read_into
from engine.models.spec import DecoderSpec
from engine.models.weights import Parameter, Target, is_redundant, parameters, targets

Weights = dict[str, torch.Tensor]

_DUMMY_STD = 0.02
# A prime, so that no matrix has a period that divides its rows.
_DUMMY_POOL = 1_048_573


def load_weights(
    spec: DecoderSpec,
    headers: list[Header],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: LoadProgress | None = None,
) -> Weights:
    """All parameters of the decoder from the files of a checkpoint, cast to ``dtype``.

    Raises:
        ModelLoadError: a tensor has no place, a place has no tensor, or a shape differs; nothing
            has been allocated then. One line that names the tensor and the file.
    """
    wanted = parameters(spec)
    plan = list(_assign(spec, headers, wanted))
    total = sum(entry.num_bytes for _, entry, _ in plan) or 1
    weights = _allocate(wanted, dtype, device)
    done = 0
    for path, placed in groupby(plan, key=lambda item: item[0].path):
        with path.open("rb") as file:
            for _, entry, target in placed:
                read_into(file, entry, _part_of(weights, wanted, target))
                done += entry.num_bytes
                if on_progress is not None:
                    on_progress(done / total, f"loading {path.name}")
    return weights


def dummy_weights(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    on_progress: LoadProgress | None = None,
) -> Weights:
    """Parameters drawn from normal(0, 0.02), norms of one: from the config alone.

    One pool of a million variates is laid end to end, from a place of its own for each
    parameter: gigabytes at the speed of a copy, and the same for the same seed.
    """
    wanted = parameters(spec)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(_DUMMY_POOL, generator=generator).mul_(_DUMMY_STD)
    pool = pool.to(device=device, dtype=dtype)
    weights = _allocate(wanted, dtype, device)
    for count, (name, tensor) in enumerate(weights.items(), 1):
        if wanted[name].is_norm:
            tensor.fill_(1.0)
        else:
            digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
            _tile(tensor.view(-1), pool, int.from_bytes(digest, "little") % _DUMMY_POOL)
        if on_progress is not None:
            on_progress(count / len(weights), "making random weights")
    return weights


def weights_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """What the parameters take in memory."""
    shapes = (parameter.shape for parameter in parameters(spec).values())
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize


def _assign(
    spec: DecoderSpec, headers: list[Header], wanted: dict[str, Parameter]
) -> Iterator[tuple[Header, TensorEntry, Target]]:
    """Every tensor with its place, in file order; a leftover or a gap is an error."""
    places = targets(spec, wanted)
    for header in headers:
        for entry in sorted(header.entries.values(), key=lambda entry: entry.begin):
            target = places.pop(entry.name, None)
            if target is None:
                if is_redundant(spec, entry.name):
                    continue
                raise ModelLoadError(
                    f"{header.path}: tensor '{entry.name[:80]}' has no place in a "
                    f"{spec.architecture} model with this config.json, or comes twice"
                )
            shape = wanted[target.parameter].part_shape(target.part)
            if entry.shape != shape:
                raise ModelLoadError(
                    f"{header.path}: tensor '{entry.name}' has shape {list(entry.shape)}, "
                    f"config.json asks for {list(shape)}"
                )
            if not entry.dtype.is_floating_point:
                raise ModelLoadError(f"{header.path}: tensor '{entry.name}' holds no floats")
            yield header, entry, target
    if places:
        missing = ", ".join(f"'{name}'" for name in sorted(places)[:4])
        directory = headers[0].path.parent
        raise ModelLoadError(f"{directory}: missing tensors ({len(places)}): {missing}")


def _allocate(wanted: dict[str, Parameter], dtype: torch.dtype, device: torch.device) -> Weights:
    try:
        return {
            name: torch.empty(parameter.shape, dtype=dtype, device=device)
            for name, parameter in wanted.items()
        }
    except RuntimeError as error:  # torch's allocators have no narrower one in common
        size = sum(math.prod(p.shape) for p in wanted.values()) * dtype.itemsize
        reason = str(error).splitlines()[0]
        raise ModelLoadError(
            f"the weights need {size / 2**20:,.0f} MiB, which {device} does not have: {reason}"
        ) from None


def _part_of(weights: Weights, wanted: dict[str, Parameter], target: Target) -> torch.Tensor:
    """The slice a checkpoint tensor fills; contiguous, as parts lie along dimension 0."""
    parts = wanted[target.parameter].parts
    begin = sum(parts[: target.part])
    return weights[target.parameter][begin : begin + parts[target.part]]


def _tile(flat: torch.Tensor, pool: torch.Tensor, offset: int) -> None:
    """Fill with the pool over and over, beginning at ``offset``."""
    done = 0
    while done < flat.numel():
        piece = pool[offset : offset + flat.numel() - done]
        flat[done : done + piece.numel()].copy_(piece)
        done += piece.numel()
        offset = 0
