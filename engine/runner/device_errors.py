"""Translate torch's errors into those of the runner's contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import EngineDead, ModelLoadError, OutOfMemory


@contextmanager
def translated_errors() -> Iterator[None]:
    """Re-raise torch's errors as the runner's contract specifies."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(str(error).splitlines()[0]) from error
    except torch.AcceleratorError as error:
        raise EngineDead(f"the GPU is lost: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # torch's CPU allocator has no own error type
            raise OutOfMemory("the step ran out of memory") from error
        raise


@contextmanager
def translated_load_errors(model: str) -> Iterator[None]:
    """Re-raise a GPU's errors while ``model`` is loaded as ``ModelLoadError``, of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise ModelLoadError(f"{model}: the GPU's memory does not suffice: {reason}") from None
    except torch.AcceleratorError as error:
        reason = str(error).splitlines()[0]
        raise ModelLoadError(f"{model}: the GPU failed while it was loaded: {reason}") from None
