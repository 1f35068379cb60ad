"""Chooses the attention backend, once, at start. Importing this does not import torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.attention import AttentionBackend, AttentionSpec


class NoBackendError(ValueError):
    """No attention backend serves the model; the message says why, one reason a backend."""


def _reference(_: AttentionSpec) -> AttentionBackend:
    from kernels.reference.attention import ReferenceAttention

    return ReferenceAttention()


def _triton(spec: AttentionSpec) -> AttentionBackend | str:
    # Found out without the import, which a start on a CPU need not pay for.
    if spec.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'quire[gpu]')"
    from kernels.triton.backend import TritonAttention

    return TritonAttention()


# ``auto`` takes the first that does not refuse. The kernels come second until they have run on a
# GPU (`make gpu-check`): so far they are held by the interpreter and by compiling them.
# A maker returns the reason where its backend cannot even be made.
_BACKENDS: dict[str, Callable[[AttentionSpec], AttentionBackend | str]] = {
    "reference": _reference,
    "triton": _triton,
}

ATTENTION_BACKENDS = ("auto", *_BACKENDS)


def select_attention(
    name: str, spec: AttentionSpec
) -> tuple[AttentionBackend, list[tuple[str, str]]]:
    """The backend for a model, and what was passed over: (name, reason) in order of preference.

    Args:
        name: one of ``ATTENTION_BACKENDS``.
        spec: what the model asks for.

    Raises:
        NoBackendError: the name is unknown, or every candidate refuses.
    """
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(ATTENTION_BACKENDS)
        raise NoBackendError(f"unknown attention backend {name!r} (known: {known})")
    refusals: list[tuple[str, str]] = []
    for candidate in _BACKENDS if name == "auto" else (name,):
        backend = _BACKENDS[candidate](spec)
        if isinstance(backend, str):
            refusals.append((candidate, backend))
            continue
        reason = backend.refuse(spec)
        if reason is None:
            return backend, refusals
        refusals.append((candidate, reason))
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refusals)
    raise NoBackendError(f"no attention backend can serve this model ({reasons})")
