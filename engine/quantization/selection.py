"""Choose the linear method once, at load, and log why others were not chosen."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable

import torch

from engine.config import Quantization
from engine.errors import ModelLoadError
from engine.models.linear import (
    DenseLinearMethod,
    DensePerHeadLinear,
    InvariantMethod,
    PerHeadLinear,
    UnquantizedLinearMethod,
)
from engine.quantization.dequant import DequantLinearMethod, KernelLinearMethod
from engine.quantization.experts import StackedExpertsMethod
from engine.quantization.method import PackedLinearMethod, WeightMethod
from engine.quantization.online import QUANT_FUNCTIONS, OnlineQuantMethod
from kernels.tiled import tiling_unsupported_reason

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def choose_method(
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool = False,
    checkpoint_format: str | None = None,
) -> WeightMethod:
    """Return the fastest supported method.

    Args:
        quantization: what to quantise dense weights to.
        dtype: of the model.
        device: of the model.
        invariant: require that a row has the same bits in any batch.
        checkpoint_format: the format of an already quantised checkpoint.

    Raises:
        ModelLoadError: there is none: no kernels for this quantisation on this device, or no
            invariant ones; or a quantised checkpoint would be quantised again.
    """
    if checkpoint_format is not None and quantization is not None:
        raise ModelLoadError(
            f"the checkpoint is quantised already ({checkpoint_format}); leave quantization "
            f"'{quantization}' out"
        )
    if checkpoint_format is not None and invariant and device.type == "cpu":
        raise ModelLoadError(f"a checkpoint in {checkpoint_format} is not batch-invariant here")
    dense, label = _dense_method(quantization, dtype, device, invariant=invariant)
    if label:
        logger.info("linear layers: %s", label)
    packed = _packed_method(dtype, device, checkpoint_format, invariant=invariant)
    plain = dense
    if quantization is not None:
        plain, _ = _dense_method(None, dtype, device, invariant=invariant)
    stacked = _stacked_experts_method(quantization, dtype, device, invariant=invariant)
    heads = _per_head_method(dtype, device, invariant=invariant)
    return WeightMethod(dense, packed, stacked, plain, heads)


def packed_unsupported_reason(
    dtype: torch.dtype, device: torch.device, *, invariant: bool = False
) -> str | None:
    """Return why no kernel multiplies quantised codes directly, or None if one does.

    With ``invariant``, only kernels count whose rows have the same bits in any batch.
    """
    if device.type == "cpu":
        if invariant:
            return "--batch-invariant is set"
        from kernels.cpu.linear import is_available

        return None if is_available() else "the native kernels are missing"
    return _triton_unsupported_reason(dtype, device, invariant=invariant)


def _kernels_unsupported_reason(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    # Not at the top: importing them takes a second, and a CPU does not need them.
    from kernels.triton.launch import device_unsupported_reason

    return device_unsupported_reason(device)


def _triton_unsupported_reason(
    dtype: torch.dtype, device: torch.device, *, invariant: bool = False
) -> str | None:
    reason = _kernels_unsupported_reason(device)
    if reason is None:
        from kernels.triton.check_products import check_packed, check_packed_bits

        reason = check_packed(dtype, device)
        if reason is None and invariant:
            reason = check_packed_bits(dtype, device)
    return reason


def _packed_method(
    dtype: torch.dtype, device: torch.device, format_name: str | None, *, invariant: bool = False
) -> PackedLinearMethod:
    """Return how codes are held; ``what`` names their format in the log, if any are expected."""
    if format_name is None and device.type != "cpu":
        return DequantLinearMethod(dtype)
    if invariant and device.type != "cpu":
        return _invariant_packed_method(dtype, device, str(format_name))
    reason = packed_unsupported_reason(dtype, device)
    if reason is None:
        if device.type == "cpu":
            from engine.quantization.panels import panel_layer
            from kernels.cpu.grouped import refuse

            form, label = (
                KernelLinearMethod(dtype, refuse, panel_layer),
                "native kernels",
            )
        else:
            form, label = _triton_method(dtype, device), "triton"
        if format_name is not None:
            logger.info("linear layers in codes: %s, %s", label, format_name)
        return form
    if format_name is not None:
        logger.warning(
            "no kernel for %s on %s, %s: weights take the memory of their codes, but each is "
            "widened for every product, which is slow",
            format_name,
            device.type,
            reason,
        )
    return DequantLinearMethod(dtype)


def _invariant_packed_method(
    dtype: torch.dtype, device: torch.device, what: str
) -> PackedLinearMethod:
    reason = _triton_unsupported_reason(dtype, device, invariant=True)
    if reason is not None:
        raise ModelLoadError(f"weights in {what} are not batch-invariant here: {reason}")
    from engine.quantization.gpu import InvariantPacked
    from kernels.triton.matmul import invariant_linear

    logger.info("linear layers in codes: triton, batch-invariant, %s", what)
    return KernelLinearMethod(dtype, tiling_unsupported_reason, InvariantPacked, invariant_linear)


def _triton_method(dtype: torch.dtype, device: torch.device) -> PackedLinearMethod:
    from engine.quantization.gpu import TritonPacked
    from kernels.triton.check_products import check_scaled

    @functools.cache
    def refuse_scaled(codes: torch.dtype) -> str | None:
        reason = check_scaled(codes, dtype, device)
        if reason is not None:
            logger.info("%s: widened for all products, %s", codes, reason)
        return reason

    layer = functools.partial(TritonPacked, refuse_scaled=refuse_scaled)
    return KernelLinearMethod(dtype, tiling_unsupported_reason, layer)


def _stacked_experts_method(
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
) -> StackedExpertsMethod:
    """Return how stacked experts are held, where one (Triton) product computes all of a layer's."""
    round_to = None if quantization is None else QUANT_FUNCTIONS[quantization]
    # Evaluated once, when the first experts are made.
    refuse = functools.cache(
        functools.partial(_triton_unsupported_reason, dtype, device, invariant=invariant)
    )
    return StackedExpertsMethod(dtype, refuse, round_to)


def _per_head_method(
    dtype: torch.dtype, device: torch.device, *, invariant: bool
) -> Callable[[torch.Tensor], PerHeadLinear]:
    """Return how per-head weights are held; they are never quantised."""
    from kernels.reference import matmul as reference

    product = reference.invariant_heads
    if device.type == "cpu":
        from kernels.cpu.linear import is_available

        if dtype == torch.bfloat16 and is_available():
            from kernels.cpu.latent import PanelHeads

            return PanelHeads
        if invariant:
            product = reference.fixed_rows_heads
    elif invariant:
        from kernels.triton.matmul import invariant_heads

        product = invariant_heads
        if _swap_unsupported_reason(dtype, device) is not None:
            product = functools.partial(invariant_heads, vary_tiles=False)
    return lambda weight: DensePerHeadLinear(weight.contiguous(), product)


def _dense_method(
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
) -> tuple[DenseLinearMethod, str]:
    if invariant:
        form, label = _invariant_method(quantization, dtype, device)
        return form, f"{label}, batch-invariant"
    if device.type != "cpu":
        dense, label = _gpu_method(dtype, device)
        if quantization is None:
            return dense, label
        form = OnlineQuantMethod(quantization, _packed_method(dtype, device, quantization), dense)
        return form, f"rounded to {quantization}, the head as it is"
    return _cpu_method(quantization, dtype)


def _gpu_method(dtype: torch.dtype, device: torch.device) -> tuple[DenseLinearMethod, str]:
    reason = _kernels_unsupported_reason(device)
    if reason is None:
        from kernels.triton.check_products import check_skinny

        reason = check_skinny(dtype, device)
    if reason is not None:
        return UnquantizedLinearMethod(), f"torch; no kernels for few rows, {reason}"
    from engine.quantization.skinny import SkinnyMethod

    return SkinnyMethod(), "triton for one row, torch above"


def _invariant_method(
    quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> tuple[DenseLinearMethod, str]:
    if device.type == "cpu" and (quantization or dtype == torch.bfloat16):
        from kernels.cpu.linear import is_available

        if quantization in (None, "int8") and is_available():
            return _cpu_method(quantization, dtype)
    if quantization is not None and device.type == "cpu":
        raise ModelLoadError(f"quantization '{quantization}' is not batch-invariant here")
    if quantization is not None:
        dense, _ = _invariant_method(None, dtype, device)
        form = _packed_method(dtype, device, quantization, invariant=True)
        return OnlineQuantMethod(
            quantization, form, dense
        ), f"rounded to {quantization}, the head as it is"
    if device.type == "cpu":
        from kernels.reference.matmul import fixed_rows_linear

        return InvariantMethod(fixed_rows_linear), "torch, 16 rows at a time"
    from kernels.triton.library import LibraryProducts
    from kernels.triton.matmul import invariant_linear

    reason = _swap_unsupported_reason(dtype, device)
    if reason is None:
        method = InvariantMethod(invariant_linear, LibraryProducts().product_for)
        return method, "triton, and the library for many rows where its bits are the same"
    as_many = functools.partial(invariant_linear, vary_tiles=False)
    return InvariantMethod(as_many), f"triton, all rows alike; {reason}"


def _swap_unsupported_reason(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why batch-invariant products of few rows must run like those of many, or None.

    In float32 they do so anyway.
    """
    if dtype == torch.float32:
        return None
    reason = _kernels_unsupported_reason(device)
    if reason is None:
        from kernels.triton.check_products import check_swapped

        reason = check_swapped(dtype, device)
    return reason


def _cpu_method(
    quantization: Quantization | None, dtype: torch.dtype
) -> tuple[DenseLinearMethod, str]:
    if quantization is None and dtype != torch.bfloat16:
        return UnquantizedLinearMethod(), "torch"
    # Not at the top: a GPU, or float32, does not need them.
    from engine.quantization import cpu
    from kernels.cpu.linear import is_available
    from kernels.cpu.native import build

    if is_available():
        label = f"native kernels for {build.target_name()}, {quantization or 'bfloat16'}"
        if quantization in (None, "int8", "int4"):
            return cpu.panel_method(quantization), label
        # The head of nf4 is int8, as that of int4 is.
        head = cpu.panel_method("int8") if quantization == "nf4" else None
        return OnlineQuantMethod(quantization, _packed_method(dtype, _CPU, None), head), label
    if quantization is not None:
        packed = _packed_method(dtype, _CPU, quantization)
        return OnlineQuantMethod(
            quantization, packed, UnquantizedLinearMethod()
        ), f"torch, {quantization}"
    if cpu.onednn_packs_bfloat16():
        return cpu.OneDnnMethod(), "oneDNN, packed once"
    return UnquantizedLinearMethod(), "torch"
