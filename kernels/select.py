"""Chooses the attention backend, once, at start. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.attention import AttentionBackend, AttentionSpec


class NoBackendError(ValueError):
    """No attention backend serves the model; the message says why, one reason a backend."""


def _reference() -> AttentionBackend:
    from kernels.reference.attention import ReferenceAttention

    return ReferenceAttention()


# From the best to the one that always works; ``auto`` takes the first that does not refuse.
_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"reference": _reference}

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
        backend = _BACKENDS[candidate]()
        reason = backend.refuse(spec)
        if reason is None:
            return backend, refusals
        refusals.append((candidate, reason))
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refusals)
    raise NoBackendError(f"no attention backend can serve this model ({reasons})")
