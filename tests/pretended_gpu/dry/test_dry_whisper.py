"""Transcripts on a pretended GPU: sources, two attentions and timestamps without waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models.audio import encoder
from engine.models.audio.spec import MelSpec
from tests.pretended_gpu.engines import config_of, on_cpu, on_pretended_gpu, texts
from tests.tiny_audio import speech
from tests.tiny_whisper import save
from tests.whisper_prompts import rules_of, transcribe


@pytest.mark.slow
@pytest.mark.parametrize("eager", ["none", "main", "side"])
def test_transcripts_are_those_of_plain_torch(
    eager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "log_mel", _frames)
    directory = tmp_path / "model"
    save(directory, decoder_layers=1, encoder_layers=1)
    _, tokens = rules_of(directory)
    requests = [
        transcribe(
            str(number),
            directory,
            speech(0.3 + 0.2 * (number // 2), number // 2),
            tokens.prompt("en", [5] * number, has_timestamps=number > 0),
            stamped=number > 0,
            max_tokens=5,
        )
        for number in range(3)
    ]
    config = config_of(str(directory))
    expected = on_cpu(config, requests)
    with on_pretended_gpu(config, eager) as rig:
        assert texts(rig.core, requests) == expected


def _frames(samples: torch.Tensor, _: torch.Tensor, spec: MelSpec) -> torch.Tensor:
    """In place of a spectrogram, which is beyond the stand-in: some samples of each frame."""
    return samples.view(-1, spec.hop)[:, : spec.num_mels].t().contiguous()
