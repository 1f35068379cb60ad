"""Features and embeddings equal Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.audio.encoder import AudioEncoder, load_audio_encoder
from engine.models.audio.features import log_mel, mel_filters
from engine.models.audio.spec import MelSpec
from engine.models.checkpoint import read_config, read_headers
from tests import tiny_audio

CPU = torch.device("cpu")
# Seconds: whole chunks and frames, rests of either, and less than a chunk.
LENGTHS = {
    "voxtral": (2.0, 0.3, 5.5),
    "qwen2_audio": (1.0, 0.3, 0.6237),
    "qwen3_asr": (1.0, 0.2, 3.0, 2.4837, 5.251),
}


class Loaded:
    """A tiny model of Hugging Face's, and our encoder of it."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.model = tiny_audio.save(kind, directory)
        config = read_config(str(directory)).audio
        assert config is not None
        self.rules = config.rules
        headers = read_headers(directory)
        self.encoder: AudioEncoder = load_audio_encoder(config, headers, torch.float32, CPU)

    def wanted(self, samples: np.ndarray) -> torch.Tensor:
        """Hugging Face's embeddings: [num_tokens, out_size]."""
        extract, model = tiny_audio.extractor(self.kind), self.model.model
        options: dict[str, Any] = {"sampling_rate": tiny_audio.RATE, "return_tensors": "pt"}
        with torch.no_grad():
            if self.kind == "voxtral":
                chunk = 200
                found = extract(
                    samples,
                    truncation=False,
                    padding=True,
                    pad_to_multiple_of=160 * chunk,
                    **options,
                )["input_features"][0]
                chunks = found.reshape(found.shape[0], -1, chunk).transpose(0, 1)
                return model.get_audio_features(chunks).pooler_output
            options["return_attention_mask"] = True
            if self.kind == "qwen3_asr":
                found = extract(samples, padding=True, **options)
                mask = found["attention_mask"]
                return model.get_audio_features(found["input_features"], mask).pooler_output
            found = extract(samples, padding="max_length", **options)
            count = int(found["attention_mask"].sum())
            states, tokens = model.audio_tower._get_feat_extract_output_lengths(count)
            seen = torch.zeros(1, 1, 50, 50)
            seen[..., states:] = torch.finfo(torch.float32).min
            out = model.audio_tower(found["input_features"], attention_mask=seen)
            return model.multi_modal_projector(out.last_hidden_state)[0, :tokens]


@pytest.fixture(scope="module", params=list(tiny_audio.KINDS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(request.param, tmp_path_factory.mktemp(request.param))


def test_embeddings_of_clips(loaded: Loaded) -> None:
    for number, seconds in enumerate(LENGTHS[loaded.kind]):
        samples = tiny_audio.speech(seconds, number)
        wanted = loaded.wanted(samples)
        with torch.inference_mode():
            found = loaded.encoder.embed(torch.from_numpy(samples)).embeddings
        assert found.shape[0] == loaded.rules.num_tokens(samples.size)
        torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_are_those_of_whispers_extractor(num_mels: int) -> None:
    import transformers

    spec = MelSpec(num_mels)
    extract = transformers.WhisperFeatureExtractor(feature_size=num_mels, chunk_length=1)
    np.testing.assert_allclose(mel_filters(spec), extract.mel_filters.T, atol=1e-7)
    silent = np.zeros(16_000, np.float32)
    click = silent.copy()
    click[5] = 1.0
    long = tiny_audio.speech(61)  # transformed in several blocks
    for samples in (tiny_audio.speech(1), silent, click, long):
        wanted = extract(
            samples,
            sampling_rate=16_000,
            return_tensors="pt",
            padding="do_not_pad",
            truncation=False,
        )["input_features"][0]
        found = log_mel(torch.from_numpy(samples), mel_filters(spec), spec)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
