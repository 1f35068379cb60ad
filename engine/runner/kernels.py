"""Choose the runner's kernels once, and report the reasons."""

from __future__ import annotations

import logging

from engine.errors import ModelLoadError
from kernels.attention import AttentionSpec
from kernels.operations import Kernels
from kernels.select import NoKernelsError, select_kernels

logger = logging.getLogger(__name__)

_DEVICES = {"triton": "cuda", "cpu": "cpu", "reference": None}  # for which kernels are made


def choose_kernels(name: str, spec: AttentionSpec, *, invariant: bool = False) -> Kernels:
    """Return the kernels called ``name``; for ``auto``, the first kind that supports the model.

    With ``invariant``, only kernels whose results for a sequence have the same bits in any batch.

    Raises:
        ModelLoadError: none supports it; gives the reason for each.
    """
    try:
        kernels, refusals = select_kernels(name, spec, invariant=invariant)
    except NoKernelsError as error:
        raise ModelLoadError(str(error)) from None
    for loser, reason in refusals:
        # On its own kind of device nothing else is nearly as fast, so its absence means a problem;
        # elsewhere it is never chosen.
        is_at_home = _DEVICES[loser] == spec.device.type
        level = logging.WARNING if is_at_home else logging.DEBUG
        logger.log(level, "attention backend %s: not used, %s", loser, reason)
    logger.info("attention backend: %s", kernels.name)
    return kernels
