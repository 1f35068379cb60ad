"""What the readers of several families' vision encoders have in common."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec
from engine.models.vision.spec import (
    AxialRope,
    MergerSpec,
    PixelSpec,
    PoolSpec,
    VisionActivation,
    VisionNorm,
    VisionSpec,
)

MAX_LAYERS = 10_000
MAX_SIDE = 1024  # of a patch, in pixels
MAX_MERGE = 16  # patches
MAX_IMAGE = 16_384  # pixels, a side
HALF = PixelSpec((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
# The layer whose features are read, possibly counted from the end; or several, side by side.
Features = int | tuple[int, ...]
CLIP = PixelSpec((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_ACTIVATIONS: dict[str, VisionActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}


def siglip_encoder(
    whole: ConfigReader,
    reader: ConfigReader,
    text: DecoderSpec,
    merger: MergerSpec | PoolSpec,
    features: Features,
) -> VisionSpec:
    """Read SigLIP's encoder (Zhai et al. 2023); see ``read_fixed``."""
    reader.ignore("vision_use_head")
    base = read_fixed(
        *(whole, reader, text, merger, features),
        patch=16,
        norm_eps=1e-6,
        activation="gelu_pytorch_tanh",
    )
    return replace(base, pixels=HALF, patch_bias=True)


def read_fixed(
    whole: ConfigReader,
    reader: ConfigReader,
    text: DecoderSpec,
    merger: MergerSpec | PoolSpec,
    features: Features,
    *,
    patch: int,
    norm_eps: float,
    activation: str,
) -> VisionSpec:
    """Read an encoder of images of one size.

    Args:
        whole, reader: the whole config and its vision section.
        text: the text model.
        merger: of the encoder.
        features: see ``Features``.
        patch, norm_eps, activation: defaults of absent keys.

    Raises:
        ModelLoadError: a value is out of range.
    """
    reader.require("num_channels", 3)
    for key in ("vocab_size", "initializer_factor"):
        reader.ignore(key)
    hidden = reader.count("hidden_size", 768)
    num_layers = reader.count("num_hidden_layers", 12, limit=MAX_LAYERS)
    chosen = features if isinstance(features, tuple) else (features,)
    layers = tuple(layer if layer >= 0 else num_layers + 1 + layer for layer in chosen)
    num_read = max(layers)
    if min(layers) < 1 or num_read > num_layers:
        raise whole.error("vision_feature_layer", f"is {features}; there are {num_layers} layers")
    side = reader.count("patch_size", patch, limit=MAX_SIDE)
    image_size = reader.count("image_size", 224, limit=MAX_IMAGE)
    if image_size < side:
        raise reader.error("image_size", f"of {image_size} is less than a patch of {side}")
    return VisionSpec(
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size", 3072),
        num_heads=read_num_heads(reader, "num_attention_heads", hidden, 12),
        num_layers=num_read,
        patch_size=side,
        merge_size=1,
        out_size=text.hidden_size,
        norm=VisionNorm("layer", reader.number("layer_norm_eps", norm_eps)),
        activation=read_activation(reader, "hidden_act", activation),
        merger=merger,
        pixels=CLIP,
        image_size=image_size,
        num_skipped_layers=num_layers - num_read,
        feature_layers=layers if len(layers) > 1 else (),
    )


def llava_projector(whole: ConfigReader, text: DecoderSpec) -> MergerSpec:
    """Read LLaVA's projector, which is applied to each patch separately."""
    return MergerSpec(
        None,
        text.hidden_size,
        read_activation(whole, "projector_hidden_act", "gelu"),
        bias=whole.flag("multimodal_projector_bias", True),
    )


def read_num_heads(reader: ConfigReader, key: str, hidden: int, default: int = 16) -> int:
    """Read the number of heads, which divides the width."""
    count = reader.count(key, default)
    if hidden % count:
        raise reader.error(key, f"must divide the {hidden} dimensions")
    return count


def read_rope(
    reader: ConfigReader,
    heads_key: str,
    head_dim: int,
    theta: float = 10_000.0,
    *,
    staggered: bool = False,
) -> AxialRope:
    """Read the rope: newer exports have a section, older ones at most its base."""
    if head_dim % 4:
        raise reader.error(heads_key, f"makes heads of {head_dim} dimensions, not a multiple of 4")
    section = reader.section("rope_parameters")
    theta = reader.number("rope_theta", theta)
    if section is None:
        return AxialRope(theta, staggered)
    kind = section.text("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise section.error("rope_type", f"is {kind[:80]!r}; only 'axial' is supported")
    theta = section.number("rope_theta", theta)
    section.finish()
    return AxialRope(theta, staggered)


def read_activation(reader: ConfigReader, key: str, default: str) -> VisionActivation:
    """Read an activation. Raises ModelLoadError for an unknown one."""
    name = reader.text(key, default)
    if name not in _ACTIVATIONS:
        raise reader.error(key, f"is {name[:80]!r}; known: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]
