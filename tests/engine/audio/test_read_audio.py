"""Audio files become samples at the model's rate, and bad ones a clear error."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from engine.audio import read
from engine.audio.read import AudioReader, process_audio
from engine.audio.resample import resample
from engine.audio.types import AudioRules
from engine.errors import InvalidParameter
from tests.tiny_audio import encoded, speech
from tests.tiny_video import moving, recorded

RULES = AudioRules(token_id=1, sampling_rate=16_000, hop=160, max_samples=16_000 * 3)


@pytest.fixture(scope="module")
def reader() -> Iterator[AudioReader]:
    found = AudioReader()
    yield found
    found.close()


def samples_of(reader: AudioReader, data: bytes) -> np.ndarray:
    return np.frombuffer(reader.read(data, RULES).samples, np.float32)


@pytest.mark.parametrize(("format", "options", "tolerance"), [
    ("WAV", {}, 1e-6),
    ("WAV", {"subtype": "PCM_16"}, 1e-4),
    ("FLAC", {}, 1e-4),
    ("AIFF", {}, 1e-4),
    ("OGG", {"subtype": "VORBIS"}, 0.1),
    ("MP3", {}, 0.1),
])  # fmt: skip
def test_formats(
    reader: AudioReader, format: str, options: dict[str, Any], tolerance: float
) -> None:
    samples = speech(1.0)
    found = samples_of(reader, encoded(samples, format=format, **options))
    assert found.size == samples.size
    np.testing.assert_allclose(found[1000:-1000], samples[1000:-1000], atol=tolerance)


def contained(samples: np.ndarray, rate: int, codec: str, format: str) -> bytes:
    """A file as FFmpeg writes it."""
    import av

    out = BytesIO()
    with av.open(out, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(np.stack([samples, samples]), "fltp", "stereo")
        frame.rate, frame.pts = rate, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize(("codec", "format", "begin"), [
    ("aac", "mp4", 0),
    ("aac", "matroska", 0),
    ("aac", "adts", 1024),  # what the encoder puts before is not marked
    ("libopus", "webm", 0),
])  # fmt: skip
def test_formats_that_pyav_reads(reader: AudioReader, codec: str, format: str, begin: int) -> None:
    rate = 48_000 if codec == "libopus" else 16_000
    samples = speech(1.0, rate=rate)
    found = samples_of(reader, contained(samples, rate, codec, format))[begin:]
    assert 0 <= found.size - 16_000 <= 1024
    wanted = resample(samples, rate, 16_000)
    assert np.abs(found[1000:15_000] - wanted[1000:15_000]).mean() < 0.02
    assert np.corrcoef(found[1000:15_000], wanted[1000:15_000])[0, 1] > 0.99


def test_a_videos_picture_alone_is_no_audio(reader: AudioReader) -> None:
    with pytest.raises(InvalidParameter, match="it has no audio"):
        reader.read(recorded(moving(2)), RULES)


def test_without_pyav_the_extra_is_named(
    reader: AudioReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = contained(speech(0.5), 16_000, "aac", "mp4")
    monkeypatch.setattr(read, "has_pyav", lambda: False)
    with pytest.raises(InvalidParameter, match=r"pip install -e '\.\[video\]'"):
        reader.read(data, RULES)


def test_what_python_writes(reader: AudioReader) -> None:
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", "none"))
        writer.writeframes((speech(0.5) * 32767).astype("<i2").tobytes())
    np.testing.assert_allclose(samples_of(reader, file.getvalue()), speech(0.5), atol=1e-4)


def test_long_files_arrive_and_leave_in_pieces(reader: AudioReader) -> None:
    rules = AudioRules(token_id=1, sampling_rate=16_000, hop=160, max_samples=16_000 * 100)
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, 16_000 * 90).astype(np.float32)
    data = encoded(noise)
    assert len(data) > 5 * 2**20
    assert reader.read(data, rules).samples == noise.tobytes()


def test_channels_are_averaged(reader: AudioReader) -> None:
    left, right = speech(0.5, 1), speech(0.5, 2)
    found = samples_of(reader, encoded(np.stack([left, right], axis=1)))
    np.testing.assert_allclose(found, (left + right) / 2, atol=1e-6)


# Named by place: a file holds the time at which it was made, and workers must agree on names.
BAD_FILES = [
    (b"", "is not WAV"),
    (b"RIFF" + bytes(200), "is not WAV"),
    (bytes(5000), "is not WAV"),
    (b"ID3" + b"\xff" * 5000, "is not WAV"),
    (b"OggS" + bytes(3000), "is not WAV"),
    (encoded(speech(0.3), format="FLAC")[:90], "is not WAV|damaged|empty|too short"),
    (encoded(speech(0)), "is empty"),
    (encoded(speech(3.1)), "3.1 s long; at most 3 s"),
    (encoded(speech(0.1) * np.float32("inf")), "not numbers"),
    (encoded(np.zeros((100, 20), np.float32)), "20 channels"),
]


@pytest.mark.parametrize(("data", "words"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files(reader: AudioReader, data: bytes, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        reader.read(data, RULES)
    assert samples_of(reader, encoded(speech(0.1))).size == 1600  # the next one is read


def test_compressed_files_may_not_be_longer_either(reader: AudioReader) -> None:
    data = encoded(speech(6.0), format="OGG")
    with pytest.raises(InvalidParameter, match="long"):
        reader.read(data, RULES)


def test_a_decoder_that_dies_is_replaced(reader: AudioReader) -> None:
    process: Any = reader._process
    assert samples_of(reader, encoded(speech(0.1))).size == 1600
    child = process._child
    child.kill()
    child.wait()
    assert samples_of(reader, encoded(speech(0.1))).size == 1600
    assert process._child.pid != child.pid


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 15_999])
def test_resampling_keeps_what_is_within_both_bands(rate: int) -> None:
    seconds = np.arange(rate // 2) / rate
    tone = np.sin(2 * np.pi * 1_000 * seconds).astype(np.float32)
    found = resample(tone, rate, 16_000)
    assert found.size == -(-tone.size * 16_000 // rate)
    wanted = np.sin(2 * np.pi * 1_000 * np.arange(found.size) / 16_000)
    np.testing.assert_allclose(found[500:-500], wanted[500:-500], atol=2e-6)


@pytest.mark.parametrize("rate", [22_050, 48_000])
def test_resampling_removes_what_would_fold_back(rate: int) -> None:
    tone = np.sin(2 * np.pi * 8_500 * np.arange(rate // 2) / rate).astype(np.float32)
    assert np.abs(resample(tone, rate, 16_000)[500:-500]).max() < 1e-5


def test_samples_of_other_shapes() -> None:
    assert process_audio(np.zeros((1600, 2), np.float64), 16_000, RULES).num_tokens == 5
    with pytest.raises(InvalidParameter, match="empty"):
        process_audio(np.zeros(0, np.float32), 16_000, RULES)
    with pytest.raises(InvalidParameter, match="0 samples per second"):
        process_audio(np.zeros(1600, np.float32), 0, RULES)
    with pytest.raises(InvalidParameter, match="too short"):
        process_audio(np.zeros(100, np.float32), 16_000, RULES)
