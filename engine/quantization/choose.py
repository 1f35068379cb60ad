"""Chooses the linear method, once, at load; the log says why not another."""

from __future__ import annotations

import logging

import torch

from engine.config import Quantization
from engine.errors import ModelLoadError
from engine.models.linear import DenseMethod, InvariantMethod, LinearMethod

logger = logging.getLogger(__name__)


def choose_method(
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool = False,
) -> LinearMethod:
    """The fastest method that serves; with ``invariant``, of those whose rows have the same bits
    in any batch.

    Raises:
        ModelLoadError: there is none: no kernels for this quantisation on this device, or none
            that are invariant.
    """
    if invariant:
        method, told = _invariant_method(quantization, dtype, device)
        logger.info("linear layers: %s, batch-invariant", told)
        return method
    if device.type != "cpu":
        if quantization is not None:
            raise ModelLoadError(
                f"quantization '{quantization}' is served on a CPU only so far; leave it out on "
                f"{device.type}, or choose --device cpu"
            )
        return DenseMethod()
    method, told = _cpu_method(quantization, dtype)
    logger.info("linear layers: %s", told)
    return method


def _invariant_method(
    quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> tuple[LinearMethod, str]:
    if device.type == "cpu" and (quantization or dtype == torch.bfloat16):
        from kernels.cpu.linear import is_available

        if quantization != "int4" and is_available():
            return _cpu_method(quantization, dtype)
    if quantization is not None:
        raise ModelLoadError(f"quantization '{quantization}' is not batch-invariant here")
    if device.type == "cpu":
        from kernels.reference.matmul import fixed_rows_linear

        return InvariantMethod(fixed_rows_linear), "torch, 16 rows at a time"
    from kernels.triton.matmul import invariant_linear

    return InvariantMethod(invariant_linear), "triton"


def _cpu_method(quantization: Quantization | None, dtype: torch.dtype) -> tuple[LinearMethod, str]:
    if quantization is None and dtype != torch.bfloat16:
        return DenseMethod(), "torch"
    # Not at the top: a start on a GPU or in float32 has no use for them.
    from engine.quantization import cpu
    from kernels.cpu.linear import is_available

    if is_available():
        return cpu.panel_method(quantization), f"native kernels, {quantization or 'bfloat16'}"
    if quantization is not None:
        logger.warning(
            "without native kernels, %s weights save memory but are slow: each is widened for "
            "every product",
            quantization,
        )
        return cpu.WidenedMethod(quantization), f"torch, {quantization}"
    if torch.backends.mkldnn.is_available():
        return cpu.OneDnnMethod(), "oneDNN, packed once"
    return DenseMethod(), "torch"
