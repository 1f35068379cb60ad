"""What the model runner hands from one part of a step to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.models.step_state import StepState
from engine.runner.drafts import StepDrafts
from engine.runner.graphs import DecodeGraph
from engine.runner.images import StepImages
from engine.runner.inputs import DeviceBatch
from engine.runner.prompt_graphs import PromptGraph
from engine.runner.sampling import StepMasks
from engine.runner.trials import StepTrial
from kernels.inputs import StepInputs


class BatchInputs(NamedTuple):
    """A step's inputs on the device."""

    sent: DeviceBatch
    step: StepInputs
    state: StepState
    images: StepImages
    graph: PromptGraph | None = None  # has captured the layers


class PreparedBatch(NamedTuple):
    """A batch ready to compute: in a captured graph, or as inputs on the device."""

    graph: DecodeGraph | None
    inputs: BatchInputs | None  # if there is no graph
    drafts: StepDrafts | None
    masks: StepMasks | None
    trial: StepTrial | None  # of a step with drafts, if the model is recurrent


class HiddenStates(NamedTuple):
    """The hidden states of a batch."""

    hidden: torch.Tensor  # [num_tokens or number of sampling rows, hidden_size]
    covers_all_tokens: bool  # of all tokens; else of the sampling rows' last tokens
