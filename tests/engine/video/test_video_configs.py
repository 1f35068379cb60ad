"""Video settings in a directory, as models are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.images.types import AreaScaling
from engine.models.vision.config import VisionConfig
from engine.video.types import FrameCap, FrameSampling
from tests.engine.models.vision import test_glm_configs as glm
from tests.engine.models.vision import test_vision_configs as qwen

# As Qwen3-VL's file has them.
QWEN3: dict[str, Any] = {
    **{"crop_size": None, "data_format": "channels_first", "default_to_square": True},
    **{"do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True},
    **{"do_resize": True, "do_sample_frames": True, "fps": 2, "image_mean": [0.5, 0.5, 0.5]},
    **{"image_std": [0.5, 0.5, 0.5], "max_frames": 768, "merge_size": 2, "min_frames": 4},
    **{"num_frames": None, "pad_size": None, "patch_size": 16, "resample": 3},
    **{"processor_class": "Qwen3VLProcessor", "rescale_factor": 1 / 255, "return_metadata": False},
    "size": {"longest_edge": 25_165_824, "shortest_edge": 4096},
    **{"temporal_patch_size": 2, "video_metadata": None},
    "video_processor_type": "Qwen3VLVideoProcessor",
}


def read(directory: Path, kind: str, **settings: Any) -> VisionConfig:
    if settings:
        (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))
    config = glm.read(directory) if kind == "glm4v" else qwen.read(directory, kind)
    assert config.vision is not None
    return config.vision


def test_the_settings_of_images_hold_for_videos_without_their_own(tmp_path: Path) -> None:
    """As in Hugging Face's code; the rate is that of Qwen's own."""
    rules = read(tmp_path, "qwen2_5_vl").video
    assert rules is not None
    assert rules.scaling == AreaScaling(3136, 12_845_056)
    assert rules.sampling == FrameSampling(rule="steps", fps=2.0, min_frames=4, max_frames=768)
    assert (rules.token_id, rules.part_frames, rules.time_steps) == (151_656, 2, 2.0)


def test_qwen3s_own_file(tmp_path: Path) -> None:
    rules = read(tmp_path, "qwen3_vl", **QWEN3).video
    assert rules is not None
    assert rules.scaling == AreaScaling(4096, 25_165_824, growing="cut")
    assert rules.sampling == FrameSampling(rule="ends", fps=2.0, min_frames=4, max_frames=768)
    assert (rules.counts_frames, rules.frame_cap, rules.time_steps) == (True, None, None)
    assert rules.text is not None
    shown = "<|vision_start|><|video_pad|><|vision_end|>"
    assert rules.text.part.format(time=1.25) == f"<1.2 seconds>{shown}"
    capped = read(tmp_path, "qwen3_vl", **QWEN3, cap_pixels_per_frame=True).video
    assert capped is not None
    assert capped.frame_cap == FrameCap(768, of_frame=True)


@pytest.mark.parametrize(("kind", "rule", "text"), [
    ("Glm4vVideoProcessor", "seconds", "3"),
    ("Glm46VVideoProcessor", "graded", "3.5 seconds"),
])  # fmt: skip
def test_glms_file_names_its_processor(tmp_path: Path, kind: str, rule: str, text: str) -> None:
    """GLM-4.6V Flash has the model type of GLM-4.1V."""
    rules = read(tmp_path, "glm4v", video_processor_type=kind).video
    assert rules is not None
    assert (rules.sampling.rule, rules.token_id, rules.cell_token_id) == (rule, 151_344, 151_343)
    assert rules.text is not None
    told = rules.text.part.format(time=3.5, second=3)
    assert told == f"<|begin_of_image|><|video|><|end_of_image|>{text}"


@pytest.mark.parametrize(("settings", "words"), [
    ({"mood": 1}, "unsupported keys: 'mood'"),
    ({"num_frames": 8}, "'num_frames' is set"),
    ({"image_mean": [0.1, 0.1, 0.1]}, "in another way than images"),
    ({"temporal_patch_size": 4}, "'temporal_patch_size'"),
    ({"fps": -1}, "'fps' must be a number above 0"),
    ({"resample": 2}, "'resample'"),
])  # fmt: skip
def test_settings_that_are_not_understood_refuse_videos_alone(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    vision = read(tmp_path, "qwen3_vl", **{**QWEN3, **settings})
    assert vision.video is None
    assert words in (vision.video_unsupported_reason or "")
