"""Chooses the linear method, once, at load; the log says why not another."""

from __future__ import annotations

import logging

import torch

from engine.config import Quantization
from engine.errors import ModelLoadError
from engine.models.linear import DenseMethod, LinearMethod

logger = logging.getLogger(__name__)


def choose_method(
    quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> LinearMethod:
    """The fastest method that serves.

    Raises:
        ModelLoadError: quantisation is asked for on a device that has no kernels for it.
    """
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
