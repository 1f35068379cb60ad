"""Readers of encoders that see an image as tiles of one size: Idefics3 and InternVL."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.shared import (
    MAX_IMAGE,
    MAX_LAYERS,
    MAX_MERGE,
    MAX_SIDE,
    read_activation,
    read_num_heads,
    siglip_encoder,
)
from engine.models.vision.spec import MergerSpec, PixelSpec, VisionNorm, VisionSpec

_IMAGENET = PixelSpec((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Values that configs leave out.
_IDEFICS3_DEFAULTS = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_QK_NORM = VisionNorm("rms", 1e-6)
_PROJECTOR_NORM = VisionNorm("layer", 1e-5)


def idefics3(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """Idefics3 (Laurençon et al. 2024) and SmolVLM (Marafioti et al. 2025): SigLIP's encoder."""
    # Hints for the processor, which has a file of its own, and for the training code.
    for key in ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip"):
        reader.ignore(key)
    reader.set_defaults(_IDEFICS3_DEFAULTS)
    merger = MergerSpec(None, None, bias=False)
    base = siglip_encoder(whole, reader, text, merger, -1)
    base = replace(base, final_norm=True, bucketed_positions=True)
    return with_cells(whole, "scale_factor", base, whole.count("scale_factor", 2, limit=MAX_MERGE))


def internvl(whole: ConfigReader, reader: ConfigReader, text: DecoderSpec) -> VisionSpec:
    """InternVL3 (Zhu et al. 2025) and 3.5: InternViT (Chen et al. 2023)."""
    whole.require("vision_feature_layer", -1)
    whole.require("vision_feature_select_strategy", "default")
    reader.require("num_channels", 3)
    reader.require("use_absolute_position_embeddings", True)
    reader.require("use_mask_token", False)
    reader.require("use_mean_pooling", True)  # otherwise there is a norm after the last layer
    for key in ("dropout", "hidden_dropout_prob", "projection_dropout"):
        reader.ignore(key)
    for key in ("initializer_factor", "layer_scale_init_value"):
        reader.ignore(key)
    kind = reader.text("norm_type", "layer_norm")
    if kind not in ("layer_norm", "rms_norm"):
        raise reader.error("norm_type", f"is {kind[:80]!r}; known: layer_norm, rms_norm")
    eps = reader.number("layer_norm_eps", 1e-6)
    hidden = reader.count("hidden_size", 1024)
    patch = _square(reader, "patch_size", 14, MAX_SIDE)
    image_size = _square(reader, "image_size", 448, MAX_IMAGE)
    if image_size < patch:
        raise reader.error("image_size", f"of {image_size} is less than a patch of {patch}")
    spec = VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size", 4096),
        num_heads=read_num_heads(reader, "num_attention_heads", hidden),
        num_layers=reader.count("num_hidden_layers", 24, limit=MAX_LAYERS),
        patch_size=patch,
        merge_size=1,
        out_size=text.hidden_size,
        norm=VisionNorm("rms" if kind == "rms_norm" else "layer", eps),
        activation=read_activation(reader, "hidden_act", "gelu"),
        merger=MergerSpec(
            _PROJECTOR_NORM,
            text.hidden_size,
            read_activation(whole, "projector_hidden_act", "gelu"),
            norm_of_cells=True,
        ),
        pixels=_IMAGENET,
        bias=reader.flag("attention_bias"),
        output_bias=True,
        qk_norm=_QK_NORM if reader.flag("use_qk_norm") else None,
        layer_scale=True,
        patch_bias=True,
        image_size=image_size,
        class_token=True,
        batched_positions=True,
    )
    ratio = whole.number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio >= 1 / MAX_MERGE else 0
    if merge == 0 or abs(merge * ratio - 1) > 1e-6:
        raise whole.error("downsample_ratio", f"is {ratio:g}, which makes no whole patches")
    spec = with_cells(whole, "downsample_ratio", spec, merge)
    whole.require("image_seq_length", (image_size // spec.cell_size) ** 2)
    return spec


def with_cells(whole: ConfigReader, key: str, spec: VisionSpec, merge: int) -> VisionSpec:
    """Return the spec with cells of ``merge`` by ``merge`` patches, which fill the image."""
    assert spec.image_size is not None
    side = spec.image_size // spec.patch_size
    if side % merge:
        raise whole.error(key, f"makes cells of {merge} patches a side; an image has {side}")
    return replace(spec, merge_size=merge)


def _square(reader: ConfigReader, key: str, default: int, limit: int) -> int:
    """Read the side of a square, given as one number or two."""
    if not reader.is_list(key):
        return reader.count(key, default, limit=limit)
    rows, columns = reader.int_pair(key)
    if rows != columns or rows >= limit:
        raise reader.error(key, f"must be a square below {limit}, not {rows} x {columns}")
    return rows
