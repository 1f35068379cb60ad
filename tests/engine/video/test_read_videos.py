"""Video files become the frames that a model sees, and bad ones a clear error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from engine.errors import InvalidParameter
from engine.images.types import AreaScaling
from engine.video import read
from engine.video.read import VideoReader
from engine.video.types import FrameSampling, VideoOptions, VideoRules
from tests.tiny_video import moving, recorded

RULES = VideoRules(
    token_id=1,
    cell_token_id=1,
    cell=4,
    part_frames=2,
    sampling=FrameSampling(rule="ends", fps=2.0, min_frames=2, max_frames=12),
    scaling=AreaScaling(16, 2**20),
    max_seconds=60,
)
ALL = VideoOptions(num_frames=12)


@pytest.fixture(scope="module")
def reader() -> Iterator[VideoReader]:
    found = VideoReader()
    yield found
    found.close()


def frames_of(reader: VideoReader, data: bytes, options: VideoOptions = ALL) -> np.ndarray:
    """[frames, height, width, 3]"""
    video = reader.read(data, RULES, options)
    pixels = b"".join(part.pixels for part in video.parts)
    return np.frombuffer(pixels, np.uint8).reshape(-1, video.height, video.width, 3)


@pytest.mark.parametrize(("codec", "format", "tolerance"), [
    ("libx264", "mp4", 2),
    ("libx264", "matroska", 2),
    ("libx264", "mpegts", 2),
    ("libvpx-vp9", "webm", 12),
    ("mpeg4", "avi", 12),
])  # fmt: skip
def test_formats(reader: VideoReader, codec: str, format: str, tolerance: float) -> None:
    """With B-frames, whose order in the file is another one."""
    frames = np.stack(moving(9))
    data = recorded(moving(9), 10, codec, format)
    found = frames_of(reader, data)
    assert found.shape == (10, *frames.shape[1:])
    difference = np.abs(found[:9].astype(int) - frames)
    assert difference.mean() < tolerance
    nearest = [np.abs(found[i].astype(int) - frames).mean((1, 2, 3)).argmin() for i in range(9)]
    assert nearest == list(range(9))
    assert (found[9] == found[8]).all()  # completes the part


def test_frames_are_scaled_as_images_are(reader: VideoReader) -> None:
    data = recorded(moving(2))
    (first, _) = frames_of(reader, data)
    video = reader.read(data, replace(RULES, scaling=AreaScaling(16, 600)), ALL)
    assert (video.height, video.width) == (20, 28)
    wanted = Image.fromarray(first).resize((28, 20), Image.Resampling.BICUBIC).tobytes()
    assert video.parts[0].pixels[: len(wanted)] == wanted


@pytest.mark.parametrize(("options", "wanted"), [
    (VideoOptions(), [0, 10, 19]),  # 1.5 seconds
    (VideoOptions(fps=4.0), [0, 4, 8, 11, 15, 19]),
    (VideoOptions(num_frames=4), [0, 6, 13, 19]),
    (VideoOptions(num_frames=2, fps=4.0), [0, 19]),
    (VideoOptions(fps=100.0), [0, 2, 3, 5, 7, 9, 10, 12, 14, 16, 17, 19]),
    (VideoOptions(num_frames=1), [0]),
])  # fmt: skip
def test_requests_choose_frames(
    reader: VideoReader, options: VideoOptions, wanted: list[int]
) -> None:
    frames = [np.full((40, 40, 3), 10 * number, np.uint8) for number in range(20)]
    found = frames_of(reader, recorded(frames, fps=13), options).mean((1, 2, 3)) / 10
    complete = [*wanted, *wanted[-1:] * (len(wanted) % 2)]
    assert found.round().astype(int).tolist() == complete


def test_a_file_with_fewer_frames_than_packets_is_sampled_again(
    reader: VideoReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with two fields for a frame."""
    call = reader._call

    def doubled(request: dict[str, Any]) -> dict[str, Any]:
        reply = call(request)
        return {**reply, "frames": 2 * reply["frames"]} if "open" in request else reply

    monkeypatch.setattr(reader, "_call", doubled)
    frames = [np.full((40, 40, 3), 10 * number, np.uint8) for number in range(20)]
    found = frames_of(reader, recorded(frames), VideoOptions(num_frames=4)).mean((1, 2, 3)) / 10
    assert found.round().astype(int).tolist() == [0, 6, 13, 19]


def test_a_turned_video_is_shown_upright(reader: VideoReader) -> None:
    """A telephone's: the track's matrix turns it."""
    data = bytearray(recorded(moving(2)))
    at = data.index(b"tkhd") + 4 + 40  # the matrix, in 16.16
    a, b, c, d = (0, 1, -1, 0)
    for place, value in ((0, a), (4, b), (12, c), (16, d)):
        data[at + place : at + place + 4] = (value << 16).to_bytes(4, "big", signed=True)
    plain, turned = frames_of(reader, recorded(moving(2))), frames_of(reader, bytes(data))
    assert (plain.shape, turned.shape) == ((2, 60, 88, 3), (2, 88, 60, 3))
    np.testing.assert_array_equal(turned[0], np.rot90(plain[0], -1))


# Named by place: workers must agree on names, whatever a library writes into files.
BAD_FILES = [
    (b"", "is not MP4"),
    (b"RIFF" + bytes(200), "is not MP4"),
    (bytes(5000), "is not MP4"),
    (recorded(moving(9))[:600], "is not MP4"),
    (recorded(moving(70), fps=1), "70.0 s long; at most 60 s"),
    (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "is not MP4"),
    (b"ffconcat version 1.0\nfile /etc/passwd\n", "is not MP4"),
]


@pytest.mark.parametrize(("data", "words"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files(reader: VideoReader, data: bytes, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        reader.read(data, RULES, ALL)
    assert len(frames_of(reader, recorded(moving(2)))) == 2  # the next one is read


def test_damaged_files_are_refused_or_shown(reader: VideoReader) -> None:
    """FFmpeg conceals damage where it can; the process survives in any case."""
    whole = recorded(moving(9), codec="mpeg4")
    rng = np.random.default_rng(0)
    for _ in range(20):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 30):
            data[place] = rng.integers(0, 256)
        with contextlib.suppress(InvalidParameter):
            assert len(frames_of(reader, bytes(data))) <= 12
    assert len(frames_of(reader, whole)) == 10


def test_large_frames_are_refused_before_they_are_decoded(
    reader: VideoReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_PIXELS", 2000)
    with pytest.raises(InvalidParameter, match="88 x 60 pixels; at most 2,000"):
        reader.read(recorded(moving(2)), RULES, ALL)


def test_without_pyav_the_extra_is_named(
    reader: VideoReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "is_available", lambda: False)
    with pytest.raises(InvalidParameter, match=r"pip install -e '\.\[video\]'"):
        reader.read(recorded(moving(2)), RULES, ALL)


def test_a_decoder_that_dies_is_replaced(reader: VideoReader) -> None:
    data = recorded(moving(2))
    assert len(frames_of(reader, data)) == 2
    process: Any = reader._process
    child = process._child
    child.kill()
    child.wait()
    assert len(frames_of(reader, data)) == 2
    assert process._child.pid != child.pid
