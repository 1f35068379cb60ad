"""Whether torch can compute on a GPU of this machine; and if not, why."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.errors import ModelLoadError

# Of the kernel's module, of a GPU, and of Windows' driver below WSL 2.
_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
_HIDDEN = ("", "-1")  # values of CUDA_VISIBLE_DEVICES for no GPU at all


def missing_reason() -> str | None:
    """Return why torch finds no GPU where there seems to be one; None: there is no sign of any, or
    they were hidden on purpose."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in _HIDDEN or not any(Path(sign).exists() for sign in _SIGNS):
        return None
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is not built for CUDA, though there is a driver"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = _first_line(error)
    else:
        reason = "no GPU is available"
    if visible is not None:
        return f"{reason} (CUDA_VISIBLE_DEVICES is {visible[:100]!r})"
    return f"{reason} (in a container, GPUs have to be given to it: --gpus all)"


def unsupported_reason(index: int) -> str | None:
    """Return why this build of torch has no kernels for a GPU, or None if it has."""
    built_for = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is not None or any(_runs_on(capability, each) for each in built_for):
        return None
    name, number = torch.cuda.get_device_name(index), ".".join(map(str, capability))
    return (
        f"GPU {index} ({name}) has compute capability {number}, and this torch "
        f"({torch.__version__}) is built for {', '.join(built_for)}"
    )


def check_works(device: torch.device) -> None:
    """Compute something on a GPU.

    Raises:
        ModelLoadError: it fails, for instance because another process has the GPU to itself.
    """
    try:
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError as error:
        raise ModelLoadError(f"the GPU {device} cannot be used: {_first_line(error)}") from None


def _runs_on(capability: tuple[int, int], built_for: str) -> bool:
    """Return whether code for ``sm_86``, ``sm_90a`` or, to be compiled, ``compute_120`` runs on a
    GPU: on those of one generation that are no older, or on all that are no older."""
    kind, _, number = built_for.partition("_")
    major, minor = divmod(int(number.rstrip("af")), 10)
    if number[-1] == "a":
        return capability == (major, minor)
    return capability >= (major, minor) and (kind == "compute" or capability[0] == major)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
