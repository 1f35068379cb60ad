"""Readers of MiniCPM-V 4.6's encoder and of its slices (Yao et al. 2024)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.images.types import SliceScaling, TileRewrite
from engine.models.config_reader import ConfigReader
from engine.models.json_file import parse_object, read_bytes
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import HALF, MAX_IMAGE, MAX_MERGE, read_fixed
from engine.models.vision.spec import InnerMergeSpec, MergerSpec, VisionNorm, VisionSpec
from engine.models.vision.tokens import ImageTokenIds, require_names, token_names

_MAX_SLICES = 1024
# Of a tokenizer's settings -> what its processor writes, if they do not say.
_MARKS = {
    **{"image_start_token": "<image>", "image_end_token": "</image>"},
    **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
    **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
}


def minicpmv4_6(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """MiniCPM-V 4.6: SigLIP's encoder for any shape, in which squares of patches become one."""
    whole.require("downsample_mode", "16x")
    whole.require("merger_times", 1)
    whole.require("drop_vision_last_layer", False)
    reader.ignore("vision_use_head")
    inner, merge = _square(reader, "window_kernel_size"), _square(whole, "merge_kernel_size")
    merger = MergerSpec(VisionNorm("layer", 1e-6), None, norm_of_cells=True)
    base = read_fixed(
        *(whole, reader, text, merger, -1),
        patch=16,
        norm_eps=1e-6,
        activation="gelu_pytorch_tanh",
    )
    assert base.image_size is not None
    layer = whole.non_negative("insert_layer_id", reader.non_negative("insert_layer_id", 6))
    if layer >= base.num_layers:
        raise whole.error("insert_layer_id", f"is {layer}; there are {base.num_layers} layers")
    return replace(
        base,
        merge_size=inner * merge,
        merger=replace(merger, inner_size=base.hidden_size * merge**2),
        pixels=HALF,
        patch_bias=True,
        image_size=None,
        position_grid_size=base.image_size // base.patch_size,
        sampled_positions="nearest",
        inner_merge=InnerMergeSpec(layer, inner),
        final_norm=True,
    )


def minicpm_scaling(spec: VisionSpec) -> SliceScaling:
    """Return the published limits."""
    return SliceScaling(448, 9)


def read_slices(reader: ConfigReader, spec: VisionSpec, scaling: SliceScaling) -> SliceScaling:
    """Read the limits of a processor's file."""
    reader.require("downsample_mode", "16x")
    reader.ignore("use_image_id")  # see ``minicpm_tokens``
    side = reader.count("scale_resolution", scaling.side, limit=MAX_IMAGE)
    if side < spec.cell_size:
        raise reader.error("scale_resolution", f"of {side} is less than a cell's side")
    most = reader.count("max_slice_nums", scaling.max_cut, limit=_MAX_SLICES)
    return SliceScaling(side, most if reader.flag("slice_mode", True) else 1)


def minicpm_tokens(config: ConfigReader, directory: Path) -> ImageTokenIds:
    """A number, the whole image, and rows of slices; the tokenizer's settings have their marks."""
    if "image_token_id" not in config:
        raise config.error("image_token_id", "is missing")
    token_id = config.non_negative("image_token_id")
    names = token_names(directory, (token_id,))
    if names is None:
        return ImageTokenIds(token_id)
    marks = _marks(directory)
    require_names(directory, tuple(marks.values()))
    whole = f"{marks['image_start_token']}{names[0]}{marks['image_end_token']}"
    number = f"{marks['image_id_start_token']}{{index}}{marks['image_id_end_token']}"
    rewriting = TileRewrite(
        names[0],
        tile=f"{marks['slice_start_token']}{names[0]}{marks['slice_end_token']}",
        whole=whole,
        alone=whole,
        row_end="\n",
        begin=number if _is_numbered(directory) else "",
        whole_first=True,
    )
    return ImageTokenIds(token_id, rewriting=rewriting)


def _marks(directory: Path) -> dict[str, str]:
    path = directory / "tokenizer_config.json"
    told = parse_object(path, read_bytes(path)) if path.is_file() else {}
    extra = told.get("extra_special_tokens")
    told |= extra if isinstance(extra, dict) else {}
    return {key: str(told.get(key, usual)) for key, usual in _MARKS.items()}


def _is_numbered(directory: Path) -> bool:
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = directory / name
        settings = parse_object(path, read_bytes(path)) if path.is_file() else {}
        for found in (settings, settings.get("image_processor")):
            if isinstance(found, dict) and isinstance(found.get("use_image_id"), bool):
                return found["use_image_id"]
    return True


def _square(reader: ConfigReader, key: str) -> int:
    """Read the side of a square, 2 by default."""
    if key not in reader:
        return 2
    rows, columns = reader.int_pair(key)
    if rows != columns or rows >= MAX_MERGE:
        raise reader.error(key, f"must be a square below {MAX_MERGE}, not {rows} x {columns}")
    return rows
