"""The loaded weights of several residual streams; see ``engine/models/altup.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from engine.models.altup_spec import AltUpSpec
from engine.models.linear import Linear, LinearMethod
from engine.models.loader import load_matrix
from engine.models.norms import NormWeights


class AltUpLayerWeights(NamedTuple):
    """Those of a layer, of S streams."""

    router: Linear  # hidden_size to S
    router_norm: NormWeights
    prediction: Linear  # S to S * S, of which [:, j, i] weighs stream i in the prediction of j
    correction: Linear  # S to S
    scale: torch.Tensor  # [hidden_size], of the corrected active stream
    laurel_down: Linear  # hidden_size to laurel_rank
    laurel_up: Linear  # and back
    laurel_norm: NormWeights

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return sum(
            part.nbytes if isinstance(part, torch.Tensor) else part.num_bytes for part in self
        )


class AltUpEnds(NamedTuple):
    """What makes the other streams of the embeddings, and merges all of them in the end."""

    enter: Linear  # hidden_size to (S - 1) * hidden_size
    leave: tuple[Linear, ...]  # hidden_size to hidden_size, for each stream but the first

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return self.enter.num_bytes + sum(linear.num_bytes for linear in self.leave)


def make_altup_layer(
    weights: Mapping[str, torch.Tensor], method: LinearMethod, i: int
) -> AltUpLayerWeights | None:
    """Make those of layer ``i``; None if the model has one residual stream."""
    scale = weights.get(f"{i}.altup.scale")
    if scale is None:
        return None

    def small(name: str) -> Linear:
        return method.make_unquantized(weights[f"{i}.altup.{name}.weight"])

    def laurel(name: str) -> Linear:
        return method.make(load_matrix(weights, f"{i}.laurel.{name}.weight"), None)

    return AltUpLayerWeights(
        router=small("router"),
        router_norm=NormWeights(weights[f"{i}.altup.norm"]),
        prediction=small("prediction"),
        correction=small("correction"),
        scale=scale,
        laurel_down=laurel("down"),
        laurel_up=laurel("up"),
        laurel_norm=NormWeights(weights[f"{i}.laurel.norm"]),
    )


def make_altup_ends(
    spec: AltUpSpec, weights: Mapping[str, torch.Tensor], method: LinearMethod
) -> AltUpEnds:
    """Make what precedes and follows the layers."""

    def linear(name: str) -> Linear:
        return method.make(load_matrix(weights, f"altup.{name}.weight"), None)

    leave = (linear(f"leave.{stream}") for stream in range(1, spec.num_streams))
    return AltUpEnds(linear("enter"), tuple(leave))
