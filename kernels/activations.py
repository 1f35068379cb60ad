"""What stands between the projections of an MLP without a gate: what is asked of the kernels."""

from __future__ import annotations

from typing import Literal

# GELU by the error function or by its tanh form; the last is the square of ReLU.
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
