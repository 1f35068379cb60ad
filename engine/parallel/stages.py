"""Pipeline parallelism: which layers each stage of a model has (Huang et al. 2019, GPipe).

    stage 0: embeddings, layers 0 .. a ──► stage 1: layers a .. b ──► ... ──► last stage: norm
       ▲  head, sampling                                                             │
       └────────────────────── hidden states of the sampling rows ───────────────────┘

The first stage alone has the embeddings and the head: tied tables are then in memory once, and rank
0 does everything that reads logits. In return that stage has fewer layers.

Each stage has a part of every block of the KV cache, so it needs a layer with keys and values if
the model has any, and a layer that reads another layer's keys and values, or uses its selection of
positions, is in the same stage as that layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from engine.models.spec import DecoderSpec
from engine.models.stage_spec import StageSpec
from engine.models.weights import parameters


def stage_of(spec: DecoderSpec, stage: int, num_stages: int) -> DecoderSpec:
    """Return the model of stage ``stage`` of ``num_stages``, which is at most ``max_stages``."""
    begin, end = stage_layers(spec, num_stages)[stage]
    own = StageSpec(begin, spec.num_layers, is_first=stage == 0, is_last=stage == num_stages - 1)
    return replace(spec, layers=spec.layers[begin:end], stage=own)


def stage_layers(spec: DecoderSpec, num_stages: int) -> list[tuple[int, int]]:
    """Return the layers of each stage, [begin, end), with weights as even as possible."""
    sizes = [0] * spec.num_layers
    ends = 0
    for name, parameter in parameters(spec).items():
        number, _, _ = name.partition(".")
        if number.isdigit():
            sizes[int(number)] += math.prod(parameter.shape)
        else:
            ends += math.prod(parameter.shape)
    return _balanced_stages(sizes, num_stages, ends, _StageBoundaries(spec))


def max_stages(spec: DecoderSpec) -> int:
    """Return the maximum number of stages."""
    cuts, count, begin = _StageBoundaries(spec), 0, 0
    for end in range(1, spec.num_layers + 1):
        if cuts.can_be_stage(begin, end) and (end == spec.num_layers or cuts.can_begin[end]):
            count, begin = count + 1, end
    return max(1, count)


class _StageBoundaries:
    """Where a model's layers may be cut.

    Attributes:
        can_begin: whether a stage may begin with a layer, by its number.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        self._num_paged = [0]  # in the layers before each
        for layer in spec.layers:
            is_paged = not layer.recurrent and layer.kv_sharing_layer is None
            is_paged |= not spec.windows  # no layer attends
            self._num_paged.append(self._num_paged[-1] + is_paged)
        self.can_begin = [True] * spec.num_layers
        lowest = spec.num_layers  # the lowest layer read by this one or later ones
        layers = spec.layers
        for number in reversed(range(spec.num_layers)):
            reads = layers[number].kv_sharing_layer
            lowest = lowest if reads is None else min(lowest, reads)
            # Neither a selection nor what experts made aside is sent from stage to stage.
            needs_previous = layers[number].shares_selection
            needs_previous |= number > 0 and layers[number - 1].experts_aside
            self.can_begin[number] = lowest >= number and not needs_previous

    def can_be_stage(self, begin: int, end: int) -> bool:
        """Return whether layers [begin, end) may be a stage, given that ``end`` is allowed."""
        return self.can_begin[begin] and self._num_paged[begin] < self._num_paged[end]


def _balanced_stages(
    sizes: Sequence[int], num_runs: int, ends: int, cuts: _StageBoundaries
) -> list[tuple[int, int]]:
    """Return the allowed runs with the least sum of squared sizes; the first one also carries
    ``ends``."""
    count = len(sizes)
    until = [0]
    for size in sizes:
        until.append(until[-1] + size)
    # By the number of sizes: the least sum, and the start of the last run for each number of runs.
    least = [
        (ends + until[end]) ** 2 if end and cuts.can_be_stage(0, end) else math.inf
        for end in range(count + 1)
    ]
    begins: list[list[int]] = [[0] * (count + 1)]
    for run in range(1, num_runs):
        found, begin_of = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(run + 1, count + 1):
            for begin in range(run, end):
                if not cuts.can_be_stage(begin, end):
                    continue
                total = least[begin] + (until[end] - until[begin]) ** 2
                if total < found[end]:
                    found[end], begin_of[end] = total, begin
        least = found
        begins.append(begin_of)
    runs: list[tuple[int, int]] = []
    end = count
    for begin_of in reversed(begins):
        runs.append((begin_of[end], end))
        end = begin_of[end]
    return runs[::-1]
