"""Audio encoders take no more memory than they report to the memory plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.models.audio.config import AudioConfig
from engine.models.audio.encoder import AudioEncoder, load_audio_encoder
from engine.models.audio.families import FAMILIES
from engine.models.audio.spec import AudioSpec, FrameConvSpec, MelSpec, PlaneConvSpec
from engine.models.vision.spec import MergerSpec, VisionNorm

_WIDTH = {"hidden_size": 160, "num_heads": 4, "num_layers": 2, "out_size": 256}
_COMMON: dict[str, Any] = {**_WIDTH, "norm": VisionNorm("layer", 1e-5), "activation": "gelu"}
SPECS = {
    "voxtral": AudioSpec(
        **_COMMON,
        intermediate_size=640,
        mel=MelSpec(80),
        convolutions=FrameConvSpec(500),
        projector=MergerSpec(None, 256, bias=False),
        window=500,
        joined=4,
    ),
    "qwen3_asr": AudioSpec(
        **_COMMON,
        intermediate_size=640,
        mel=MelSpec(80),
        convolutions=PlaneConvSpec(100, 60),
        projector=MergerSpec(None, 160),
        window=104,
        key_bias=True,
    ),
}


@pytest.mark.parametrize("kind", SPECS)
def test_embeddings_take_no_more_memory_than_is_told(kind: str) -> None:
    spec = SPECS[kind]
    rules = FAMILIES[kind].rules(1, spec)
    config = AudioConfig(spec, rules)
    encoder = load_audio_encoder(config, [], torch.float32, torch.device("cpu"), seed=0)
    peaks = []
    for seconds in (1, 20, 90):
        told = encoder.activation_bytes(rules.num_tokens(seconds * 16_000))
        peaks.append(_peak_bytes(encoder, torch.zeros(seconds * 16_000)))
        assert peaks[-1] <= told
    assert told < 3 * peaks[-1] + encoder.activation_bytes(0)


def _peak_bytes(encoder: AudioEncoder, samples: torch.Tensor) -> int:
    """The peak memory of torch while a clip is embedded."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.inference_mode(),
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        encoder.embed(samples)
    profiler: Any = profile.profiler
    most = held = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
