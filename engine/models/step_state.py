"""State that the layers of one step share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.models.adapters import Adapters
from engine.models.trial import Trial
from kernels.inputs import StepRows

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of a step's positions


class StepImageEmbeddings(NamedTuple):
    """Replacements for the embeddings of a step's image tokens."""

    token_indices: torch.Tensor  # [n] int64, in the step
    embeddings: torch.Tensor  # [n, hidden_size]
    # Each [n, hidden_size], added to the residual stream after one of the first layers, in order.
    deepstack: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class StepState:
    """State that the layers of one step share."""

    attention: Any  # the backend's plan
    slot_mapping: torch.Tensor  # [num_tokens] int64: where each token's keys and values go
    positions: torch.Tensor  # [num_tokens] int64
    rotations: tuple[Rotation, ...]  # of the positions, one for each of the model's ropes
    adapters: Adapters | None = None  # of the tokens; None: no row has one
    output_adapters: Adapters | None = None  # of the tokens whose result is read
    # [num_tokens, hidden_size], what a draft head reads beside the tokens
    previous_hidden_states: torch.Tensor | None = None
    per_layer: torch.Tensor | None = None  # [num_tokens, layers, per_layer_size], for each layer
    images: StepImageEmbeddings | None = None  # None: no token of the step is in an image
    rows: StepRows | None = None  # which tokens belong to which row, for recurrent layers
    trial: Trial | None = None  # None: no token of the step is on trial
