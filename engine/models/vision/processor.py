"""How images are preprocessed for a model, from the files beside config.json.

Older exports have ``preprocessor_config.json``; newer ones a section of ``processor_config.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from engine.images.types import (
    AnyresScaling,
    AreaScaling,
    BudgetScaling,
    CornerScaling,
    EdgeScaling,
    FixedScaling,
    GridScaling,
    PaddedScaling,
    Resampling,
    Scaling,
    SliceScaling,
    SplitScaling,
    TileScaling,
)
from engine.models.config_reader import ConfigReader
from engine.models.json_file import parse_object, read_bytes
from engine.models.vision.kimi import as_hugging_face, read_padding
from engine.models.vision.lfm import read_split
from engine.models.vision.llava import read_canvases
from engine.models.vision.minicpm import read_slices
from engine.models.vision.spec import PixelSpec, VisionSpec

_RESAMPLING: dict[int, Resampling] = {  # Pillow's numbers
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
}
_MAX_PIXELS = 2**31
_MAX_LONGEST = 2**16  # pixels; the larger ones have no effect
_MAX_TILES = 1024
# Names of code and of its outputs, which are determined by the model's own config here.
WITHOUT_EFFECT = (
    *("image_processor_type", "feature_extractor_type", "processor_class", "video_processor_type"),
    *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping"),
    *("do_convert_rgb", "default_to_square", "num_channels", "_valid_processor_keys"),
    "image_seq_length",
    # Of a feature extractor for audio, which Qwen2.5-Omni has in the same file.
    *("chunk_length", "dither", "feature_size", "hop_length", "n_fft", "n_samples"),
    *("nb_max_frames", "padding_side", "padding_value", "return_attention_mask", "sampling_rate"),
)


class Processing(NamedTuple):
    """How an image becomes the encoder's input."""

    pixels: PixelSpec
    scaling: Scaling
    resampling: Resampling


def read_processing(
    directory: Path, spec: VisionSpec, scaling: Scaling, resampling: Resampling
) -> Processing:
    """Read a directory's image preprocessing.

    Args:
        directory: of the model.
        spec: of its encoder.
        scaling, resampling: the family's, as defaults.

    Raises:
        ModelLoadError: a file is damaged, or requires something that is not implemented.
    """
    if isinstance(scaling, (TileScaling, GridScaling)):
        _check_token_count(directory, spec)
    reader = find_settings(directory, "image_processor", ("preprocessor_config.json",))
    if reader is None:
        return Processing(spec.pixels, scaling, resampling)
    reader = as_hugging_face(reader)
    for key in WITHOUT_EFFECT:
        reader.ignore(key)
    for key in ("do_resize", "do_rescale"):
        reader.require(key, True)
    usual = next(number for number, name in _RESAMPLING.items() if name == resampling)
    filter_number = reader.non_negative("resample", usual)
    if filter_number not in _RESAMPLING:
        known = ", ".join(f"{number} ({name})" for number, name in _RESAMPLING.items())
        problem = f"is {filter_number}; known: {known}"
        raise reader.error("resample", problem)
    reader.require("temporal_patch_size", spec.num_frames or 1)
    reader.require("merge_size", spec.merge_size)
    side = spec.processor_patch or spec.patch_size
    if not reader.has_value("patch_size", {"height": side, "width": side}):
        reader.require("patch_size", side)
    if isinstance(scaling, BudgetScaling):
        pixels = _unnormalised(reader, spec.pixels)
    else:
        reader.require("do_normalize", True)
        pixels = PixelSpec(
            _channels(reader, "image_mean", spec.pixels.mean),
            _channels(reader, "image_std", spec.pixels.std),
            reader.number("rescale_factor", spec.pixels.rescale),
        )
    found = _scaling(reader, spec, scaling, pixels)
    reader.finish()
    return Processing(pixels, found, _RESAMPLING[filter_number])


def _scaling(
    reader: ConfigReader, spec: VisionSpec, scaling: Scaling, pixels: PixelSpec
) -> Scaling:
    if isinstance(scaling, FixedScaling):
        return _fixed(reader, scaling)
    if isinstance(scaling, AnyresScaling):
        return read_canvases(reader, scaling, pixels)
    reader.require("do_center_crop", False)
    reader.ignore("crop_size")
    reader.ignore("do_pad")  # of several images to one size
    if isinstance(scaling, SplitScaling):
        return read_split(reader, spec, scaling)
    if isinstance(scaling, SliceScaling):
        return read_slices(reader, spec, scaling)
    if isinstance(scaling, PaddedScaling):
        return read_padding(reader, spec, scaling)
    if isinstance(scaling, TileScaling):
        return _tiles(reader, scaling)
    if isinstance(scaling, GridScaling):
        return _grid(reader, scaling)
    if isinstance(scaling, CornerScaling):
        reader.require("size", {"height": scaling.side, "width": scaling.side})
        most = reader.count("max_patches", scaling.max_cut, limit=_MAX_TILES)
        grows = reader.flag("resize_to_max_canvas", scaling.grows)
        return CornerScaling(scaling.side, most, grows)
    if isinstance(scaling, BudgetScaling):
        return _budget(reader, spec, scaling)
    return (
        read_area(reader, scaling) if isinstance(scaling, AreaScaling) else _edge(reader, scaling)
    )


def _fixed(reader: ConfigReader, scaling: FixedScaling) -> FixedScaling:
    """Use the encoder's size; the file says whether to crop the centre."""
    reader.require("do_pad", False)
    reader.require("do_pan_and_scan", False)  # additional crops of an image (Gemma 3)
    for key in ("min_crop_size", "max_num_crops", "min_ratio_to_activate"):
        reader.ignore(f"pan_and_scan_{key}")
    square = {"height": scaling.side, "width": scaling.side}
    crop = reader.flag("do_center_crop", scaling.crop)
    if not crop:
        reader.ignore("crop_size")
        reader.require("size", square)
        return FixedScaling(scaling.side, crop=False)
    reader.require("crop_size", square)
    reader.require("size", {"shortest_edge": scaling.side})
    return FixedScaling(scaling.side, crop=True)


def _tiles(reader: ConfigReader, scaling: TileScaling) -> TileScaling:
    reader.ignore("video_sampling")
    reader.require("max_image_size", {"longest_edge": scaling.side})
    longest, size = scaling.longest, reader.section("size")
    if size is not None:
        longest = size.count("longest_edge", limit=_MAX_LONGEST)
        size.finish()
    return TileScaling(scaling.side, longest, reader.flag("do_image_splitting", True))


def _grid(reader: ConfigReader, scaling: GridScaling) -> GridScaling:
    reader.ignore("crop_to_patches")  # the model's processor does it whatever the file says
    reader.require("size", {"height": scaling.side, "width": scaling.side})
    least = reader.count("min_patches", scaling.min_cut)
    most = reader.count("max_patches", scaling.max_cut, limit=_MAX_TILES)
    if least > most:
        raise reader.error("max_patches", f"of {most} is less than the {least} of min_patches")
    return replace(scaling, min_cut=least, max_cut=most)


def _check_token_count(directory: Path, spec: VisionSpec) -> None:
    """Check that prompts have as many tokens for a tile as the encoder makes."""
    path = directory / "processor_config.json"
    if path.is_file():
        assert spec.image_size is not None, "the side of a tile"
        reader = ConfigReader(parse_object(path, read_bytes(path)), str(path))
        for key in ("image_seq_len", "image_seq_length"):
            reader.require(key, (spec.image_size // spec.cell_size) ** 2)


def find_settings(directory: Path, section: str, older: tuple[str, ...]) -> ConfigReader | None:
    """Find a processor's settings; the newest file takes precedence, as in transformers.

    Args:
        directory: of the model.
        section: of ``processor_config.json``.
        older: files that are read if there is none, the first that exists.
    """
    path = directory / "processor_config.json"
    if path.is_file():
        found = ConfigReader(parse_object(path, read_bytes(path)), str(path)).section(section)
        if found is not None:
            return found
    for name in older:
        path = directory / name
        if path.is_file():
            return ConfigReader(parse_object(path, read_bytes(path)), str(path))
    return None


def require_normalisation(reader: ConfigReader, pixels: PixelSpec) -> None:
    """Require that pixels are normalised as those of images are."""
    for key in ("do_rescale", "do_normalize"):
        reader.require(key, True)
    own = PixelSpec(
        _channels(reader, "image_mean", pixels.mean),
        _channels(reader, "image_std", pixels.std),
        reader.number("rescale_factor", pixels.rescale),
    )
    if own != pixels:
        raise reader.error("image_mean", "normalises videos in another way than images")


def read_area(reader: ConfigReader, scaling: AreaScaling) -> AreaScaling:
    """Read the area limits, in any of three spellings; those outside of ``size`` come first."""
    least, most = scaling.min_pixels, scaling.max_pixels
    size = reader.section("size")
    if size is not None:
        least = size.count("shortest_edge", size.count("min_pixels", least))
        most = size.count("longest_edge", size.count("max_pixels", most))
        size.finish()
    least = reader.count("min_pixels", least)
    most = reader.count("max_pixels", most, limit=_MAX_PIXELS)
    if least > most:
        raise reader.error("max_pixels", f"of {most} is less than the {least} of min_pixels")
    return replace(scaling, min_pixels=least, max_pixels=most)


def _edge(reader: ConfigReader, scaling: EdgeScaling) -> EdgeScaling:
    size = reader.section("size")
    if size is None:
        return scaling
    longest = size.count("longest_edge", scaling.longest)
    size.finish()
    return EdgeScaling(longest)


def _budget(reader: ConfigReader, spec: VisionSpec, scaling: BudgetScaling) -> BudgetScaling:
    reader.ignore("size")  # whatever it is
    patch = spec.processor_patch or spec.patch_size
    reader.require("pooling_kernel_size", spec.cell_size // patch)
    return BudgetScaling(reader.count("max_soft_tokens", scaling.max_cells))


def _unnormalised(reader: ConfigReader, pixels: PixelSpec) -> PixelSpec:
    """For models that normalise images themselves: bytes are only scaled to 0..1."""
    if reader.flag("do_normalize"):
        for key, value in (("image_mean", 0.0), ("image_std", 1.0)):
            reader.require(key, [value] * 3)
    for key in ("image_mean", "image_std"):
        reader.ignore(key)
    return PixelSpec(pixels.mean, pixels.std, reader.number("rescale_factor", pixels.rescale))


def _channels(
    reader: ConfigReader, key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Read one number for each of the three channels."""
    if key not in reader:
        return default
    values = reader.numbers(key)
    if len(values) != 3:
        raise reader.error(key, "must be three numbers")
    return values[0], values[1], values[2]
