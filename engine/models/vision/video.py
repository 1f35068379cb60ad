"""How a model's processor prepares videos, from the files of its directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from engine.images.types import AreaScaling, FixedScaling, ImageRules
from engine.models.config_reader import ConfigReader
from engine.models.vision.processor import (
    WITHOUT_EFFECT,
    find_settings,
    read_area,
    require_normalisation,
)
from engine.models.vision.spec import VisionSpec
from engine.models.vision.tokens import token_id_of, token_names
from engine.video.types import FrameCap, FrameSampling, PartText, SamplingRule, VideoRules

_QWEN2_SCALING = AreaScaling(128 * 28 * 28, 768 * 28 * 28)
_QWEN3_SCALING = AreaScaling(128 * 32 * 32, 768 * 32 * 32, growing="cut")
_GLM_SCALING = AreaScaling(112 * 112, 28 * 28 * 2 * 30_000, growing="cut")
_QWEN2_TOKENS = 128_000  # the context in which ``cap_pixels_per_frame`` shares out tokens
_QWEN3_TOKENS = 768  # of a frame
_LATEST_GLM = "46V"  # in the names of GLM-4.6V's processors
_SETTINGS = ("video_preprocessor_config.json", "preprocessor_config.json")


class VideoInputs(NamedTuple):
    """What is known of a model before its videos are read."""

    config: ConfigReader  # the whole
    directory: Path
    spec: VisionSpec  # with the pixels of images
    images: ImageRules


RulesReader = Callable[[VideoInputs], VideoRules]


def qwen2_vl(given: VideoInputs) -> VideoRules:
    """Qwen2-VL: the parts of a video follow each other, one unit of time each."""
    return _qwen2(given, 0.0)


def qwen2_5_vl(given: VideoInputs) -> VideoRules:
    """Qwen2.5-VL: the time between parts is that of the video."""
    vision = given.config.section("vision_config")
    assert vision is not None, "its encoder was read"
    return _qwen2(given, vision.number("tokens_per_second", 4))


def qwen3_vl(default: int) -> RulesReader:
    """Return the reader of Qwen3-VL and Qwen3.5, whose prompts tell the time of each part.

    ``default`` is the usual id of the token for videos.
    """

    def read(given: VideoInputs) -> VideoRules:
        config, reader = given.config, _settings(given)
        token_id = config.non_negative("video_token_id", default)
        begin = config.non_negative("vision_start_token_id", default - 4)
        end = config.non_negative("vision_end_token_id", default - 3)
        names = token_names(given.directory, (begin, token_id, end))
        shown = "".join(names or ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"))
        text = PartText(template_text=shown, part=f"<{{time:.1f}} seconds>{shown}", time="middle")
        rules = _area_rules(given, reader, _QWEN3_SCALING, token_id, token_id)
        rules = replace(
            rules,
            counts_frames=True,
            sampling=_qwen_sampling(reader, "ends"),
            frame_cap=_cap(reader, _QWEN3_TOKENS, of_frame=True),
            text=text,
        )
        reader.finish()
        return rules

    return read


def glm4v(default: int, *, is_latest: bool = False) -> RulesReader:
    """Return the reader of GLM-4.1V to 4.6V, whose prompts show a video as images with times.

    Args:
        default: the usual id of the token for videos.
        is_latest: prepare videos as for GLM-4.6V, if no file names its processor.
    """

    def read(given: VideoInputs) -> VideoRules:
        config, reader = given.config, _settings(given)
        kind = reader.text("video_processor_type", "") or reader.text("processor_class", "")
        latest = _LATEST_GLM in kind if kind else is_latest
        token_id = config.non_negative("video_token_id", default)
        begin = config.non_negative("image_start_token_id", 151_339)
        end = config.non_negative("image_end_token_id", 151_340)
        names = token_names(given.directory, (begin, token_id, end))
        first, video, last = names or ("<|begin_of_image|>", "<|video|>", "<|end_of_image|>")
        time = "{time:.1f} seconds" if latest else "{second}"
        rules = _area_rules(given, reader, _GLM_SCALING, token_id, given.images.token_id)
        reader.ignore("num_frames")
        reader.ignore("max_image_size")
        seconds = reader.number("max_duration", 300)
        fps = reader.number("fps", 2)
        if latest:
            sampling = FrameSampling(rule="graded", fps=0.0, max_frames=640)
        else:
            sampling = FrameSampling(rule="seconds", fps=fps, max_seconds=seconds)
        reader.finish()
        return replace(
            rules,
            counts_frames=True,
            sampling=sampling,
            text=PartText(template_text=video, part=f"{first}{video}{last}{time}"),
        )

    return read


def internvl(given: VideoInputs) -> VideoRules:
    """InternVL3 and 3.5: each frame is an image of one tile, and has a number.

    The reference leaves the number of frames to the caller, so its usual range is kept here.
    """
    reader, side = _settings(given), given.spec.image_size
    assert side is not None, "the side of a tile"
    for key in ("crop_to_patches", "min_patches", "max_patches"):
        reader.ignore(key)  # of images
    reader.require("size", {"height": side, "width": side})
    reader.require("initial_shift", True)
    fps = reader.number("fps", 1)
    most = reader.count("num_frames", 32)
    reader.finish()
    token_id = token_id_of(given.directory, "<video>")
    return VideoRules(
        token_id=token_id,
        cell_token_id=given.images.token_id,
        cell=given.spec.cell_size,
        sampling=FrameSampling(rule="middles", fps=fps, min_frames=min(8, most), max_frames=most),
        scaling=FixedScaling(side, crop=False),
        text=PartText(
            template_text="<video>", part="Frame{number}: <img><video></img>", separator="\n"
        ),
    )


def _qwen2(given: VideoInputs, time_steps: float) -> VideoRules:
    reader = _settings(given)
    token_id = given.config.non_negative("video_token_id", 151_656)
    rules = _area_rules(given, reader, _QWEN2_SCALING, token_id, token_id)
    rules = replace(
        rules,
        sampling=_qwen_sampling(reader, "steps"),
        frame_cap=_cap(reader, _QWEN2_TOKENS, of_frame=False),
        time_steps=time_steps,
    )
    reader.finish()
    return rules


def _settings(given: VideoInputs) -> ConfigReader:
    """Return the processor's settings, those of images if videos have none; empty without files."""
    found = find_settings(given.directory, "video_processor", _SETTINGS)
    reader = ConfigReader({}) if found is None else found
    for key in (*WITHOUT_EFFECT, "do_sample_frames", "return_metadata", "do_pad", "max_image_size"):
        reader.ignore(key)
    reader.require("do_resize", True)
    require_normalisation(reader, given.spec.pixels)
    reader.require("temporal_patch_size", given.spec.num_frames or 1)
    reader.require("merge_size", given.spec.merge_size)
    reader.require("patch_size", given.spec.patch_size)
    reader.require("resample", 3)
    reader.require("do_center_crop", False)
    reader.ignore("crop_size")
    return reader


def _area_rules(
    given: VideoInputs, reader: ConfigReader, scaling: AreaScaling, token_id: int, cell_token: int
) -> VideoRules:
    return VideoRules(
        token_id=token_id,
        cell_token_id=cell_token,
        cell=given.spec.cell_size,
        part_frames=given.spec.num_frames or 1,
        sampling=FrameSampling(rule="ends"),
        scaling=read_area(reader, scaling),
    )


def _qwen_sampling(reader: ConfigReader, rule: SamplingRule) -> FrameSampling:
    reader.refuse("num_frames", "is set, which is not supported; the rate is")
    return FrameSampling(
        rule=rule,
        fps=reader.number("fps", 2),
        min_frames=reader.count("min_frames", 4),
        max_frames=reader.count("max_frames", 768),
    )


def _cap(reader: ConfigReader, tokens: int, *, of_frame: bool) -> FrameCap | None:
    most = reader.count("max_video_tokens", tokens)
    return FrameCap(most, of_frame) if reader.flag("cap_pixels_per_frame") else None
