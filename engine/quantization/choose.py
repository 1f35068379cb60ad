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
    DenseForm,
    DenseHeads,
    DenseMethod,
    HeadProducts,
    InvariantMethod,
)
from engine.quantization.experts import StackedForm
from engine.quantization.method import PackedForm, WeightMethod
from engine.quantization.rounded import ROUNDINGS, RoundedForm
from engine.quantization.widened import KernelPackedForm, WidenedPackedForm
from kernels.skinny import MOST_ROWS
from kernels.tiled import refuse_tiles

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def choose_method(
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool = False,
    stored: str | None = None,
) -> WeightMethod:
    """Return the fastest supported method.

    Args:
        quantization: what to quantise dense weights to.
        dtype: of the model.
        device: of the model.
        invariant: require that a row has the same bits in any batch.
        stored: the format of an already quantised checkpoint.

    Raises:
        ModelLoadError: there is none: no kernels for this quantisation on this device, or no
            invariant ones; or a quantised checkpoint would be quantised again.
    """
    if stored is not None and quantization is not None:
        raise ModelLoadError(
            f"the checkpoint is quantised already ({stored}); leave quantization "
            f"'{quantization}' out"
        )
    if stored is not None and invariant and device.type == "cpu":
        raise ModelLoadError(f"a checkpoint in {stored} is not batch-invariant here")
    dense, told = _dense_form(quantization, dtype, device, invariant=invariant)
    if told:
        logger.info("linear layers: %s", told)
    packed = _packed_form(dtype, device, stored, invariant=invariant)
    plain = dense
    if quantization is not None:
        plain, _ = _dense_form(None, dtype, device, invariant=invariant)
    stacked = _stacked_form(quantization, dtype, device, invariant=invariant)
    heads = _heads_form(dtype, device, invariant=invariant)
    return WeightMethod(dense, packed, stacked, plain, heads)


def refuse_codes(
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
    return _refuse_triton(dtype, device, invariant=invariant)


def _refuse_kernels(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    # Not at the top: importing them takes a second, and a CPU does not need them.
    from kernels.triton.launch import refuse_device

    return refuse_device(device)


def _refuse_triton(
    dtype: torch.dtype, device: torch.device, *, invariant: bool = False
) -> str | None:
    reason = _refuse_kernels(device)
    if reason is None:
        from kernels.triton.check_products import check_packed, check_packed_bits

        reason = check_packed(dtype, device)
        if reason is None and invariant:
            reason = check_packed_bits(dtype, device)
    return reason


def _packed_form(
    dtype: torch.dtype, device: torch.device, what: str | None, *, invariant: bool = False
) -> PackedForm:
    """Return how codes are held; ``what`` names their format in the log, if any are expected."""
    if what is None and device.type != "cpu":
        return WidenedPackedForm(dtype)
    if invariant and device.type != "cpu":
        return _invariant_packed_form(dtype, device, str(what))
    reason = refuse_codes(dtype, device)
    if reason is None:
        if device.type == "cpu":
            from engine.quantization.panels import panel_layer
            from kernels.cpu.grouped import refuse

            form, told = KernelPackedForm(dtype, refuse, panel_layer), "native kernels"
        else:
            form, told = _triton_form(dtype, device), "triton"
        if what is not None:
            logger.info("linear layers in codes: %s, %s", told, what)
        return form
    if what is not None:
        logger.warning(
            "no kernel for %s on %s, %s: weights take the memory of their codes, but each is "
            "widened for every product, which is slow",
            what,
            device.type,
            reason,
        )
    return WidenedPackedForm(dtype)


def _invariant_packed_form(dtype: torch.dtype, device: torch.device, what: str) -> PackedForm:
    reason = _refuse_triton(dtype, device, invariant=True)
    if reason is not None:
        raise ModelLoadError(f"weights in {what} are not batch-invariant here: {reason}")
    from engine.quantization.gpu import InvariantPacked
    from kernels.triton.matmul import invariant_linear

    logger.info("linear layers in codes: triton, batch-invariant, %s", what)
    return KernelPackedForm(dtype, refuse_tiles, InvariantPacked, invariant_linear)


def _triton_form(dtype: torch.dtype, device: torch.device) -> PackedForm:
    from engine.quantization.gpu import TritonPacked
    from kernels.triton.check_products import check_scaled

    reason = check_scaled(dtype, device)
    if reason is not None:
        logger.info("float8: widened for all products, %s", reason)
    layer = functools.partial(TritonPacked, in_float8=reason is None)
    return KernelPackedForm(dtype, refuse_tiles, layer)


def _stacked_form(
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
) -> StackedForm:
    """Return how stacked experts are held, where one (Triton) product computes all of a layer's."""
    round_to = None if quantization is None else ROUNDINGS[quantization]
    # Evaluated once, when the first experts are made.
    refuse = functools.cache(functools.partial(_refuse_triton, dtype, device, invariant=invariant))
    return StackedForm(dtype, refuse, round_to)


def _heads_form(
    dtype: torch.dtype, device: torch.device, *, invariant: bool
) -> Callable[[torch.Tensor], HeadProducts]:
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
        if _refuse_turned(dtype, device) is not None:
            product = functools.partial(invariant_heads, turns=False)
    return lambda weight: DenseHeads(weight.contiguous(), product)


def _dense_form(
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool,
) -> tuple[DenseForm, str]:
    if invariant:
        form, told = _invariant_form(quantization, dtype, device)
        return form, f"{told}, batch-invariant"
    if device.type != "cpu":
        dense, told = _gpu_form(dtype, device)
        if quantization is None:
            return dense, told
        form = RoundedForm(quantization, _packed_form(dtype, device, quantization), dense)
        return form, f"rounded to {quantization}, the head as it is"
    return _cpu_form(quantization, dtype)


def _gpu_form(dtype: torch.dtype, device: torch.device) -> tuple[DenseForm, str]:
    reason = _refuse_kernels(device)
    if reason is None:
        from kernels.triton.check_products import check_skinny

        reason = check_skinny(dtype, device)
    if reason is not None:
        return DenseMethod(), f"torch; no kernels for few rows, {reason}"
    from engine.quantization.skinny import SkinnyMethod

    return SkinnyMethod(), f"triton up to {MOST_ROWS} rows, torch above"


def _invariant_form(
    quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> tuple[DenseForm, str]:
    if device.type == "cpu" and (quantization or dtype == torch.bfloat16):
        from kernels.cpu.linear import is_available

        if quantization in (None, "int8") and is_available():
            return _cpu_form(quantization, dtype)
    if quantization is not None and device.type == "cpu":
        raise ModelLoadError(f"quantization '{quantization}' is not batch-invariant here")
    if quantization is not None:
        dense, _ = _invariant_form(None, dtype, device)
        form = _packed_form(dtype, device, quantization, invariant=True)
        return RoundedForm(
            quantization, form, dense
        ), f"rounded to {quantization}, the head as it is"
    if device.type == "cpu":
        from kernels.reference.matmul import fixed_rows_linear

        return InvariantMethod(fixed_rows_linear), "torch, 16 rows at a time"
    from kernels.triton.matmul import invariant_linear

    reason = _refuse_turned(dtype, device)
    if reason is None:
        return InvariantMethod(invariant_linear), "triton"
    as_many = functools.partial(invariant_linear, turns=False)
    return InvariantMethod(as_many), f"triton, few rows as many; {reason}"


def _refuse_turned(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why batch-invariant products of few rows must run like those of many, or None.

    In float32 they do so anyway.
    """
    if dtype == torch.float32:
        return None
    reason = _refuse_kernels(device)
    if reason is None:
        from kernels.triton.check_products import check_turned

        reason = check_turned(dtype, device)
    return reason


def _cpu_form(quantization: Quantization | None, dtype: torch.dtype) -> tuple[DenseForm, str]:
    if quantization is None and dtype != torch.bfloat16:
        return DenseMethod(), "torch"
    # Not at the top: a GPU, or float32, does not need them.
    from engine.quantization import cpu
    from kernels.cpu.linear import is_available
    from kernels.cpu.native import build

    if is_available():
        told = f"native kernels for {build.target_name()}, {quantization or 'bfloat16'}"
        if quantization in (None, "int8", "int4"):
            return cpu.panel_method(quantization), told
        # The head of nf4 is int8, as that of int4 is.
        head = cpu.panel_method("int8") if quantization == "nf4" else None
        return RoundedForm(quantization, _packed_form(dtype, _CPU, None), head), told
    if quantization is not None:
        packed = _packed_form(dtype, _CPU, quantization)
        return RoundedForm(quantization, packed, DenseMethod()), f"torch, {quantization}"
    if torch.backends.mkldnn.is_available():
        return cpu.OneDnnMethod(), "oneDNN, packed once"
    return DenseMethod(), "torch"
