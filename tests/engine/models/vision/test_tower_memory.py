"""Encoders take no more memory than they report to the memory plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.images.types import AreaScaling, ImageRules
from engine.models.vision.config import VisionConfig
from engine.models.vision.spec import (
    AxialRope,
    GatedMergerSpec,
    MergerSpec,
    PixelSpec,
    PoolSpec,
    VisionNorm,
    VisionSpec,
)
from engine.models.vision.tower import VisionTower, load_tower

_RULES = ImageRules(token_id=1, cell=28, scaling=AreaScaling(1, 2**24), max_images=1)
_RMS = VisionNorm("rms", 1e-6)
# About as wide relative to a patch as the published ones.
_PLAIN = VisionSpec(
    hidden_size=320,
    intermediate_size=1280,
    num_heads=4,
    num_layers=2,
    patch_size=14,
    merge_size=2,
    out_size=512,
    norm=_RMS,
    activation="quick_gelu",
    merger=MergerSpec(_RMS, 1280),
    pixels=PixelSpec((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    architecture="qwen2_vl",
    rope=AxialRope(10_000.0),
    num_frames=2,
)
SPECS = {
    "plain": _PLAIN,
    "windows": replace(_PLAIN, gated=True, window=4, full_attention_layers=frozenset([1])),
    "deep": replace(_PLAIN, deepstack_layers=(0, 1), position_grid_size=12),
    "pooled": replace(_PLAIN, merger=PoolSpec(1e-6, weighted=True, inputs_first=True)),
    "sandwich": replace(
        _PLAIN,
        bias=False,
        mlp_bias=False,
        gated=True,
        sandwich=True,
        num_frames=None,
        channels_last=True,
        rope=AxialRope(100.0, split_halves=True),
        num_axis_positions=64,
        merger=PoolSpec(1e-6, scale=18.0, standardised=True),
    ),
    "scaled": replace(
        _PLAIN, layer_scale=True, qk_norm=_RMS, merger=MergerSpec(_RMS, 512, norm_of_cells=True)
    ),
    "projected": replace(_PLAIN, merger=MergerSpec(None, None, bias=False)),
    "glm": replace(
        _PLAIN,
        architecture="glm4v",
        gated=True,
        position_grid_size=12,
        sampled_positions="bicubic",
        patch_norm=True,
        norm_before_positions=True,
        qk_norm=VisionNorm("rms", 1e-6, by_head=True),
        merger=GatedMergerSpec(1600),
    ),
    "joined": replace(_PLAIN, gated=True, merger=MergerSpec(_RMS, 512, bias=False, joined=True)),
}


# bfloat16 is slow on processors without instructions for it. GLM's parts have the same shares in
# any dtype.
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in SPECS),
        *(
            pytest.param(kind, torch.bfloat16, marks=() if kind == "plain" else pytest.mark.slow)
            for kind in SPECS
            if kind != "glm"
        ),
    ],
)
def test_embeddings_take_no_more_memory_than_is_told(kind, dtype):
    model = VisionConfig(SPECS[kind], _RULES)
    tower = load_tower(model, [], dtype, torch.device("cpu"), seed=0)
    for rows, columns in [(1, 1), (9, 6), (20, 20)]:
        pixels = torch.zeros((rows * 28, columns * 28, 3), dtype=torch.uint8)
        told = tower.activation_bytes(rows * columns)
        # A matrix of scores over all patches would exceed the rest of it.
        assert _peak_bytes(tower, pixels) <= told
    assert told < 2 * _peak_bytes(tower, pixels) + tower.activation_bytes(0)


def _peak_bytes(tower: VisionTower, pixels: torch.Tensor) -> int:
    """The peak memory of torch while an image is embedded."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        tower.embed(pixels)
    profiler: Any = profile.profiler
    most = held = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
