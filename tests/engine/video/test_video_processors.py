"""Frames, sizes and pixels are those of Hugging Face's video processors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.checkpoint import read_config
from engine.models.vision.patches import make_layout, patchify
from engine.video.read import process_frames
from engine.video.sampling import Clip, choose_frames
from engine.video.types import VideoOptions
from tests import tiny_vision
from tests.engine.video.reference import frames_of
from tests.tiny_video import VideoTwin

CLASSES = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLVideoProcessor", {"fps": 2}),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVideoProcessor", {}),
    "glm4v": ("glm4v", "Glm4vVideoProcessor", {}),
    "glm46v": ("glm46v", "Glm46VVideoProcessor", {}),
}
# Frames, frames per second, height and width.
CLIPS = (
    *((37, 10.0, 90, 130), (5, 30.0, 64, 64), (60, 24.0, 40, 300), (90, 29.97, 33, 21)),
    *((7, 1.0, 500, 80), (130, 2.5, 28, 28)),
)
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "qwen2_vl": [
        {},
        {"max_frames": 6, "size": {"shortest_edge": 3136, "longest_edge": 9000}},
        {"cap_pixels_per_frame": True, "max_video_tokens": 60, "min_frames": 2, "fps": 0.5},
    ],
    "qwen3_vl": [
        {},
        {"fps": 1, "min_frames": 2, "size": {"shortest_edge": 4096, "longest_edge": 60_000}},
        {"cap_pixels_per_frame": True, "max_video_tokens": 5},
    ],
    "glm4v": [{}, {"fps": 1, "max_duration": 2}],
    "glm46v": [{}],
}
CASES = [
    {
        **{"kind": kind, "module": module, "class": name, "settings": {**settings, **more}},
        **{"num_frames": count, "fps": fps, "size": [height, width], "seed": number},
    }
    for kind, (module, name, settings) in CLASSES.items()
    for more in SETTINGS[kind]
    for number, (count, fps, height, width) in enumerate(CLIPS)
]


@pytest.mark.slow
def test_internvls_frames_are_those_of_its_processor(tmp_path: Path) -> None:
    """Which is told their number."""
    twin = VideoTwin("internvl", tmp_path / "model")
    settings = {
        **{"size": {"height": 28, "width": 28}, "image_mean": [0.485, 0.456, 0.406]},
        "image_std": [0.229, 0.224, 0.225],
    }
    named = {"module": "internvl", "class": "InternVLVideoProcessor", "settings": settings}
    cases = [
        {
            **{**named, "num_frames": count, "fps": fps, "size": [height, width]},
            **{"seed": number, "asked": {"num_frames": wanted}},
        }
        for number, (count, fps, height, width) in enumerate(CLIPS)
        for wanted in (1, 5, 3 if count < 8 else 8)
    ]
    results = told(tmp_path, cases)
    (twin.directory / "video_preprocessor_config.json").write_text(json.dumps(settings))
    vision = read_config(str(twin.directory)).vision
    assert vision is not None
    rules, spec = vision.video, vision.spec.pixels
    assert rules is not None, vision.video_unsupported_reason
    for number, case in enumerate(cases):
        clip, options = Clip(case["num_frames"], case["fps"]), VideoOptions(**case["asked"])
        chosen = choose_frames(clip, rules.sampling, options, rules.part_frames)
        assert chosen == results[f"{number}.indices"].tolist(), case
        video = process_frames([*frames_of(case)[chosen]], case["fps"], rules)
        pixels = np.stack([np.frombuffer(part.pixels, np.uint8) for part in video.parts])
        found = pixels.reshape(-1, 28, 28, 3) / np.float32(255)
        found = (found - np.float32(spec.mean)) / np.float32(spec.std)
        (wanted,) = results[f"{number}.pixel_values_videos"]
        bound = 2.1 / 255 / 0.224
        np.testing.assert_allclose(found.transpose(0, 3, 1, 2), wanted, atol=bound, rtol=0)


def told(directory: Path, cases: list[dict[str, Any]]) -> Any:
    """What Hugging Face's processors make of the cases."""
    asked, results = directory / "cases.json", directory / "results.npz"
    asked.write_text(json.dumps(cases))
    program = [sys.executable, "-m", "tests.engine.video.reference", str(asked), str(results)]
    subprocess.run(program, check=True, capture_output=True)
    return np.load(results)


@pytest.mark.slow
def test_frames_and_pixels_are_those_of_hugging_faces_processors(tmp_path: Path) -> None:
    results = told(tmp_path, CASES)
    for kind in CLASSES:
        tiny_vision.save(kind, tmp_path / kind)
    for number, case in enumerate(CASES):
        directory = tmp_path / case["kind"]
        name = CLASSES[case["kind"]][1]
        settings = {"video_processor_type": name, **case["settings"]}
        (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))
        vision = read_config(str(directory)).vision
        assert vision is not None
        rules = vision.video
        assert rules is not None, vision.video_unsupported_reason
        clip = Clip(case["num_frames"], case["fps"])
        chosen = choose_frames(clip, rules.sampling, VideoOptions(), rules.part_frames)
        assert chosen == results[f"{number}.indices"].tolist(), case
        video = process_frames([*frames_of(case)[chosen]], case["fps"], rules)
        side = vision.spec.patch_size
        (grid,) = results[f"{number}.video_grid_thw"].tolist()
        assert [len(video.parts), video.height // side, video.width // side] == grid, case
        layout = make_layout(*grid[1:], vision.spec, torch.device("cpu"))
        shape = (rules.part_frames, video.height, video.width, 3)
        found = [
            patchify(
                torch.frombuffer(bytearray(part.pixels), dtype=torch.uint8).view(shape),
                *(layout, side, vision.spec.pixels),
            )
            for part in video.parts
        ]
        wanted = torch.from_numpy(results[f"{number}.pixel_values_videos"])
        # torchvision scales bytes with weights rounded otherwise than in Pillow.
        torch.testing.assert_close(torch.cat(found), wanted, atol=2.1 / 255 / 0.26, rtol=0)
        exact = (torch.cat(found) - wanted).abs() < 1e-5
        assert exact.float().mean() > 0.98, case
