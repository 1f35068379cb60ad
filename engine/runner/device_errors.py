"""What the tensor library raises, in the runner's own terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import EngineDead, OutOfMemory


@contextmanager
def translated_errors() -> Iterator[None]:
    """What the tensor library raises, as the runner's contract has it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(str(error).splitlines()[0]) from error
    except torch.AcceleratorError as error:
        raise EngineDead(f"the GPU is lost: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # torch's CPU allocator has no type for it
            raise OutOfMemory("the step ran out of memory") from error
        raise
