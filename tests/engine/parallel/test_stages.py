"""The layers and parameters of each stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from engine.models.checkpoint import read_config
from engine.models.weights import parameters
from engine.parallel.shard import Shard, parameter_slices
from engine.parallel.stages import stage_layers
from tests import tiny_models


def spec_of(tmp_path, kind="llama", num_layers=3, **changes):
    spec = read_config(str(tiny_models.save(kind, tmp_path))).spec
    return replace(spec, layers=(spec.layers[-1],) * num_layers, **changes)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("num_layers", [7, 24, 61])
def test_stages_have_all_layers_in_order_and_the_first_no_more_than_others(
    tmp_path, num_layers, num_stages
):
    runs = stage_layers(spec_of(tmp_path, num_layers=num_layers), num_stages)
    assert len(runs) == num_stages
    assert (runs[0][0], runs[-1][1]) == (0, num_layers)
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    counts = [end - begin for begin, end in runs]
    assert min(counts) >= 1
    assert counts[0] == min(counts)


@pytest.mark.parametrize(
    ("vocab_size", "counts"),
    [(16, [8, 8, 8]), (600, [6, 9, 9]), (1_000_000, [1, 11, 12])],
    ids=["little", "some", "most"],
)
def test_the_first_stage_has_as_many_layers_less_as_the_ends_weigh(tmp_path, vocab_size, counts):
    spec = spec_of(tmp_path, num_layers=24, vocab_size=vocab_size)
    runs = stage_layers(spec, 3)
    assert sorted(end - begin for begin, end in runs) == sorted(counts)
    assert runs[0][1] == counts[0]


def test_layers_of_other_weights_are_counted_by_them(tmp_path):
    """In a model whose first layers are dense, small layers count for little."""
    spec = read_config(str(tiny_models.save("deepseek_v3", tmp_path))).spec
    dense = replace(spec.layers[0], experts=False)
    experts = replace(spec.layers[0], experts=True)
    spec = replace(spec, layers=(dense,) * 8 + (experts,) * 8, vocab_size=16)
    ((_, end), _) = stage_layers(spec, 2)
    assert end > 8


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("size", [1, 2])
def test_each_parameter_lies_in_one_stage(tmp_path, kind, size):
    whole = read_config(str(tiny_models.save(kind, tmp_path))).spec
    held = [
        parameter_slices(whole, Shard(0, size, stage=stage, num_stages=3)) for stage in range(3)
    ]
    names = [name for cuts in held for name in cuts]
    assert sorted(names) == sorted(parameters(whole))
    assert "embedding" in held[0]
    assert "norm" in held[2]
