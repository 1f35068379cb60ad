"""The attention backend of a runner: chosen once, with the reasons told."""

from __future__ import annotations

import logging

from engine.errors import ModelLoadError
from kernels.attention import AttentionBackend, AttentionSpec
from kernels.select import NoBackendError, select_attention

logger = logging.getLogger(__name__)


def choose_attention(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend called ``name``, or for ``auto`` the first that serves the model.

    Raises:
        ModelLoadError: there is none; says why for each.
    """
    try:
        backend, refusals = select_attention(name, spec)
    except NoBackendError as error:
        raise ModelLoadError(str(error)) from None
    for loser, reason in refusals:
        logger.info("attention backend %s: not used, %s", loser, reason)
    logger.info("attention backend: %s", backend.name)
    return backend
