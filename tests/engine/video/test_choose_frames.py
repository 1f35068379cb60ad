"""Which frames of a video are shown; ``test_video_processors.py`` compares more of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.video.sampling import Clip, choose_frames
from engine.video.types import FrameSampling, SamplingRule, VideoOptions

RULES: list[SamplingRule] = ["steps", "ends", "seconds", "graded", "middles"]


# What Hugging Face's processors choose of 37 frames at 10 a second.
@pytest.mark.parametrize(("rule", "options", "wanted"), [
    ("steps", {"min_frames": 4}, [0, 6, 12, 18, 24, 30]),
    ("ends", {"min_frames": 4}, [0, 6, 12, 18, 24, 30, 36]),
    ("seconds", {}, [0, 5, 10, 15, 20, 25, 30, 30]),
    (
        *("graded", {"fps": 0.0}),
        [0, 1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 15, 17, 18, 20, 21, 22, 24, 25, 27, 28, 30],
    ),
])  # fmt: skip
def test_processors_choices(rule: SamplingRule, options: dict[str, Any], wanted: list[int]) -> None:
    sampling = FrameSampling(rule=rule, **options)
    assert choose_frames(Clip(37, 10.0), sampling, VideoOptions(), 2) == wanted


@settings(max_examples=40)
@given(
    st.sampled_from(RULES),
    st.integers(1, 400),
    st.floats(0.1, 120),
    st.integers(1, 50),
    st.one_of(st.none(), st.integers(1, 60)),
    st.one_of(st.none(), st.floats(0.01, 90)),
)
def test_choices_are_frames_of_the_video_within_the_limits(
    rule: SamplingRule,
    count: int,
    fps: float,
    most: int,
    num_frames: int | None,
    wanted_fps: float | None,
) -> None:
    sampling = FrameSampling(rule=rule, min_frames=4, max_frames=most)
    options = VideoOptions(num_frames, wanted_fps)
    found = choose_frames(Clip(count, fps), sampling, options, 2)
    assert found
    assert found == sorted(found)
    assert 0 <= found[0] <= found[-1] < count
    assert len(set(found)) <= min(most, num_frames or most)
    if num_frames is not None and wanted_fps is None:
        assert len(found) == min(num_frames, most, count)
