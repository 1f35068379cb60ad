"""Activations of MLPs without a gate, and of gates, as the kernels are asked for them."""

from __future__ import annotations

from typing import Literal

# GELU by the error function or by tanh; relu2 is the square of ReLU.
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
# What a gate's value becomes before it multiplies something; softplus is ``log(1 + e^x)``.
OutputGateKind = Literal["sigmoid", "silu", "softplus"]
