"""Pipeline parallelism: which layers each stage of a model has (Huang et al. 2019, GPipe).

    stage 0: embeddings, layers 0 .. a ──► stage 1: layers a .. b ──► ... ──► last stage: norm
       ▲  head, sampling                                                             │
       └────────────────────────── the states of rows that choose ───────────────────┘

Embeddings and head lie with the first stage alone: so a table that is both lies in memory once, and
all that reads logits is rank 0's. To make up for it that stage has fewer layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from engine.models.spec import DecoderSpec, StageSpec
from engine.models.weights import parameters


def stage_of(spec: DecoderSpec, stage: int, num_stages: int) -> DecoderSpec:
    """The model that one of so many stages is; no more than there are layers."""
    begin, end = stage_layers(spec, num_stages)[stage]
    own = StageSpec(begin, is_first=stage == 0, is_last=stage == num_stages - 1)
    return replace(spec, layers=spec.layers[begin:end], stage=own)


def stage_layers(spec: DecoderSpec, num_stages: int) -> list[tuple[int, int]]:
    """The run of layers, [begin, end), of each stage: as even in weights as can be."""
    sizes = [0] * spec.num_layers
    ends = 0
    for name, parameter in parameters(spec).items():
        number, _, _ = name.partition(".")
        if number.isdigit():
            sizes[int(number)] += math.prod(parameter.shape)
        else:
            ends += math.prod(parameter.shape)
    return _even_runs(sizes, num_stages, ends)


def _even_runs(sizes: Sequence[int], num_runs: int, ends: int) -> list[tuple[int, int]]:
    """Runs of at least one, the first of which also carries ``ends``; the sum of the squares of
    what each carries is least."""
    count = len(sizes)
    until = [0]
    for size in sizes:
        until.append(until[-1] + size)
    # By the number of sizes: the least sum, and where the last of the runs begins in each.
    least = [math.inf, *((ends + total) ** 2 for total in until[1:])]
    begins: list[list[int]] = [[0] * (count + 1)]
    for run in range(1, num_runs):
        found, begin_of = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(run + 1, count + 1):
            for begin in range(run, end):
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
