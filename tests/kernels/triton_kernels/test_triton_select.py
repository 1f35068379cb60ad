"""Without a GPU and without the interpreter, the backend says why it is unavailable."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.attention import AttentionSpec
from kernels.select import NoKernelsError, select_kernels

SPEC = AttentionSpec(4, 2, 64, 16, torch.float32, torch.device("cpu"))

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is chosen"
)


def test_asked_for_by_name_it_is_an_error() -> None:
    with pytest.raises(NoKernelsError, match="no CUDA device"):
        select_kernels("triton", SPEC)
