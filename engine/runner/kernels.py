"""The kernels of a runner: chosen once, with the reasons told."""

from __future__ import annotations

import logging

from engine.errors import ModelLoadError
from kernels.attention import AttentionSpec
from kernels.operations import Kernels
from kernels.select import NoKernelsError, select_kernels

logger = logging.getLogger(__name__)


def choose_kernels(name: str, spec: AttentionSpec, *, invariant: bool = False) -> Kernels:
    """The kernels called ``name``, or for ``auto`` the first kind that serves the model.

    With ``invariant``, of those whose results for a sequence have the same bits in any batch.

    Raises:
        ModelLoadError: there is none; says why for each.
    """
    try:
        kernels, refusals = select_kernels(name, spec, invariant=invariant)
    except NoKernelsError as error:
        raise ModelLoadError(str(error)) from None
    for loser, reason in refusals:
        # On a GPU nothing else is nearly as fast, and something is amiss where it cannot be had.
        is_costly = loser == "triton" and spec.device.type == "cuda"
        level = logging.WARNING if is_costly else logging.INFO
        logger.log(level, "attention backend %s: not used, %s", loser, reason)
    logger.info("attention backend: %s", kernels.name)
    return kernels
