"""Choose the kernels once, at start. Importing this module does not import torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.attention import AttentionSpec
    from kernels.operations import Kernels

    _Maker = Callable[[AttentionSpec], Kernels | str]


class NoKernelsError(ValueError):
    """No kernels serve the model; the message gives the reason for each kind."""


def _reference(_: AttentionSpec) -> Kernels:
    from kernels.operations import Kernels
    from kernels.reference import operations
    from kernels.reference.attention import ReferenceAttention

    return Kernels(ReferenceAttention(), operations)


def _cpu(spec: AttentionSpec) -> Kernels | str:
    if spec.device.type != "cpu":
        return "the model is not on a CPU"
    from kernels.cpu.native import build

    try:
        build.open_library()
    except build.BuildError as error:
        return str(error)
    from kernels.cpu import operations
    from kernels.cpu.backend import CpuAttention
    from kernels.operations import Kernels

    return Kernels(CpuAttention(), operations)


def _triton(spec: AttentionSpec) -> Kernels | str:
    # Check this before the import, which a start on a CPU should not have to pay for.
    if spec.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (.venv/bin/pip install -e '.[gpu]')"
    from kernels.operations import Kernels
    from kernels.triton import operations
    from kernels.triton.backend import TritonAttention

    return Kernels(TritonAttention(), operations)


def _triton_on_gpu(spec: AttentionSpec) -> Kernels | str:
    """Return Triton's kernels for ``auto``, which uses them only on a GPU."""
    return "it is for GPUs" if spec.device.type == "cpu" else _triton(spec)


def _wrong_on_device(kernels: Kernels, spec: AttentionSpec, *, invariant: bool) -> str | None:
    """Return which of Triton's kernels gives wrong results on this very device; None if none."""
    if kernels.name != "triton":
        return None
    from kernels.triton.selfcheck import check_batch_invariance, self_check

    for each in spec.by_heads().values():
        reason = kernels.attention.refuse(each) or self_check(kernels, each)
        if reason is None and invariant:
            reason = check_batch_invariance(kernels, each)
        if reason is not None:
            return reason
    return None


# In the order in which ``auto`` tries them. A maker returns a reason if its kernels cannot be made.
_FACTORIES: dict[str, _Maker] = {
    "triton": _triton,
    "cpu": _cpu,
    "reference": _reference,
}
_AUTO_FACTORIES = {**_FACTORIES, "triton": _triton_on_gpu}

ATTENTION_BACKENDS = ("auto", *_FACTORIES)


def _invariant(kernels: Kernels) -> Kernels | str:
    """Return these kernels with a fixed order of summation, however a prompt is cut into steps; or
    why there are none.

    This concerns attention and recurrent states; the other kernels have a fixed order anyway.
    """
    if kernels.name == "reference":
        return "its sums depend on the batch"
    if kernels.name == "triton":
        from kernels.triton import invariant_operations
        from kernels.triton.backend import TritonAttention

        return type(kernels)(TritonAttention(invariant=True), invariant_operations)
    from kernels.cpu import invariant_operations as for_a_cpu
    from kernels.per_token import PerTokenAttention

    return type(kernels)(PerTokenAttention(kernels.attention), for_a_cpu)


def _chunked(kernels: Kernels) -> Kernels:
    """Return these kernels for models with chunked attention layers."""
    from kernels.chunked import ChunkedAttention

    return kernels._replace(attention=ChunkedAttention(kernels.attention))


def _selecting(kernels: Kernels) -> Kernels:
    """Return these kernels for models whose queries attend to a selection of positions."""
    from kernels.reference.sparse import SlotAttention
    from kernels.sparse import SparseAttention

    # The reference plans on the host, which does not know what will be selected.
    over_slots = SlotAttention() if kernels.name == "reference" else None
    attention = SparseAttention(kernels.attention, kernels.operations, over_slots)
    return kernels._replace(attention=attention)


def _with_source(kernels: Kernels) -> Kernels:
    """Return these kernels for models whose texts attend to an encoder's output, too."""
    from kernels.source import SourceAttention

    return kernels._replace(attention=SourceAttention(kernels.attention, kernels.operations))


def _with_mixed_heads(kernels: Kernels) -> Kernels:
    """Return these kernels for models with several kinds of heads."""
    from kernels.mixed_heads import MixedHeadsAttention

    return kernels._replace(attention=MixedHeadsAttention(kernels.attention))


def _without_attention(kernels: Kernels) -> Kernels:
    """Return these kernels for models in which no layer attends."""
    from kernels.no_attention import NoAttention

    return kernels._replace(attention=NoAttention(kernels.attention))


def _for_layers(kernels: Kernels, spec: AttentionSpec) -> Kernels:
    """Return these kernels with the attention that the model's layers need, where it differs."""
    if spec.chunk_size is not None and not kernels.supports_chunked_attention:
        kernels = _chunked(kernels)
    if spec.other_heads:
        kernels = _with_mixed_heads(kernels)
    if spec.selection is not None:
        kernels = _selecting(kernels)
    if spec.source is not None:
        kernels = _with_source(kernels)
    return kernels if spec.has_attention_layers else _without_attention(kernels)


def _candidate(
    make: _Maker, spec: AttentionSpec, *, invariant: bool, is_checked: bool
) -> Kernels | str:
    """Return one maker's kernels for the model, or why they cannot serve it."""
    kernels = make(spec)
    if invariant and not isinstance(kernels, str):
        kernels = _invariant(kernels)
    if isinstance(kernels, str):
        return kernels
    wrong = _wrong_on_device(kernels, spec, invariant=invariant) if is_checked else None
    if wrong is not None:
        return wrong
    kernels = _for_layers(kernels, spec)
    reason = kernels.attention.refuse(spec)
    return kernels if reason is None else reason


def select_kernels(
    name: str, spec: AttentionSpec, *, invariant: bool = False
) -> tuple[Kernels, list[tuple[str, str]]]:
    """Return a model's kernels, and the rejected ones: (name, reason) in order of preference.

    Args:
        name: one of ``ATTENTION_BACKENDS``; the other kernels are of the same kind as the
            attention.
        spec: what the model needs of its attention.
        invariant: require that results for a sequence have the same bits in any batch, however its
            prompt is cut.

    Raises:
        NoKernelsError: the name is unknown, or every candidate refuses.
    """
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(ATTENTION_BACKENDS)
        raise NoKernelsError(f"unknown attention backend {name!r} (known: {known})")
    refusals: list[tuple[str, str]] = []
    makers = _AUTO_FACTORIES if name == "auto" else {name: _FACTORIES[name]}
    for candidate, make in makers.items():
        kernels = _candidate(make, spec, invariant=invariant, is_checked=name == "auto")
        if not isinstance(kernels, str):
            return kernels, refusals
        refusals.append((candidate, kernels))
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refusals)
    raise NoKernelsError(f"no attention backend can serve this model ({reasons})")
