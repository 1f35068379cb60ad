"""The size to which the frames of a video are scaled: ``resize`` of Hugging Face's processors."""

from __future__ import annotations

from msgspec.structs import replace

from engine.images.read import within_area
from engine.images.types import AreaScaling, FixedScaling
from engine.video.types import FrameCap, VideoRules


def frame_size(height: int, width: int, num_frames: int, rules: VideoRules) -> tuple[int, int]:
    """Return the height and width, in whole cells, of a video's frames for a model.

    Args:
        height, width: of the video.
        num_frames: that are shown.
        rules: of the model.

    Raises:
        InvalidParameter: the video is too narrow.
    """
    scaling = rules.scaling
    if isinstance(scaling, FixedScaling):
        return scaling.side, scaling.side
    cell, step = rules.cell, rules.part_frames
    num_frames = max(num_frames, step)
    if rules.frame_cap is not None:
        scaling = replace(scaling, max_pixels=_capped(scaling, rules.frame_cap, num_frames, rules))
    # The reference rounds the number of frames for the scaled area, and not for the given one.
    counted = round(num_frames / step) * step if rules.counts_frames else 1
    if rules.max_tokens is not None:
        each = max(1, rules.max_tokens // -(-num_frames // step))
        most = min(scaling.max_pixels, each * cell**2 * counted)
        least = min(scaling.min_pixels, most)
        scaling = replace(scaling, min_pixels=least, max_pixels=most)
    if rules.counts_frames:
        scaling = replace(scaling, num_frames=num_frames)
    return within_area(height, width, scaling, cell, counted)


def _capped(scaling: AreaScaling, cap: FrameCap, num_frames: int, rules: VideoRules) -> int:
    """Return the most pixels, of a frame or of all as ``scaling`` counts them."""
    least = int(scaling.min_pixels * 1.05)
    tokens = cap.max_video_tokens * rules.cell**2
    if not cap.of_frame:
        share = int(tokens * 0.9) * rules.part_frames // num_frames
        return max(min(scaling.max_pixels, share), least)
    return max(min(tokens, scaling.max_pixels // num_frames), least) * num_frames
