"""Decisions about videos that precede loading weights."""

from __future__ import annotations

import logging

import torch
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.images.types import FixedScaling
from engine.models.vision.config import VisionConfig
from engine.video.types import VideoRules

logger = logging.getLogger(__name__)

# Default limits of a video. On a CPU its tokens would take minutes to read; on a GPU more would
# have more pixels than a prompt may hold.
_MAX_CPU_TOKENS, _MAX_TOKENS = 2048, 16_384
_MAX_CPU_FRAMES = 64


def plan_video(
    config: EngineConfig, vision: VisionConfig, device: torch.device
) -> VideoRules | None:
    """Decide how a model that takes images takes videos; None if it takes none."""
    if not config.max_videos:
        return None
    if vision.video_unsupported_reason is not None:
        logger.info("videos are not taken: %s", vision.video_unsupported_reason)
    rules = vision.video
    if rules is None:
        return None
    is_cpu = device.type == "cpu"
    most = config.max_video_frames or (_MAX_CPU_FRAMES if is_cpu else rules.sampling.max_frames)
    sampling = replace(rules.sampling, max_frames=min(most, rules.sampling.max_frames))
    if config.video_fps is not None:
        sampling = replace(sampling, fps=config.video_fps)
    tokens = config.max_video_tokens or (_MAX_CPU_TOKENS if is_cpu else _MAX_TOKENS)
    if isinstance(rules.scaling, FixedScaling):  # fewer frames instead of smaller ones
        each = (rules.scaling.side // rules.cell) ** 2
        parts = tokens // each
        if not parts:
            logger.info("videos are not taken: a frame has %d tokens, more than a video may", each)
            return None
        most = min(sampling.max_frames, parts * rules.part_frames)
        sampling = replace(sampling, max_frames=most)
    return replace(
        rules,
        sampling=sampling,
        max_videos=config.max_videos,
        max_seconds=config.max_video_s,
        max_tokens=tokens,
    )


def max_part_cells(rules: VideoRules) -> int:
    """Return the most tokens of a part of a video, whose cells are embedded at once."""
    if isinstance(rules.scaling, FixedScaling):
        return (rules.scaling.side // rules.cell) ** 2
    most = rules.scaling.max_pixels // rules.cell**2
    return min(most, rules.max_tokens or most)
