"""The parameters of a vision encoder, and where every tensor of a checkpoint goes.

See ``engine/models/weights.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.models.vision.names import TABLES
from engine.models.vision.spec import (
    AdapterSpec,
    GatedMergerSpec,
    InnerMergeSpec,
    MergerSpec,
    PoolSpec,
    VisionNorm,
    VisionSpec,
)
from engine.models.weights import Parameter, Target

# Prefixes of an encoder's names; newer exports put the whole model's name before them, and older
# ones nest another inside.
_OWN = re.compile(
    r"(?:model\.|thinker\.)?(?:"
    r"(visual|vision_tower|vision_model|vision_encoder|vision_projection|multi_modal_projector"
    r"|mm_projector|merger|mlp_AR|connector|embed_vision|vision_embedder)\."
    r"(?:vision_model\.)?(.*)|(image_newline))",
    re.DOTALL,
)
# Modules after the features that are used, and a table that is computed instead.
_UNREAD = re.compile(
    r"(?:vision_tower|visual)\.(?:post_layernorm\..*|head\..*)"
    r"|visual\.embeddings\.packing_position_embedding\.weight"
    r"|(?:vision_tower|vision_model|visual)\.embeddings\.position_ids"
)
_LAYER = re.compile(r"vision_tower\.encoder\.layers\.(\d{1,5})\..*")


def vision_targets(spec: VisionSpec, wanted: Mapping[str, Parameter]) -> dict[str, Target]:
    """Return checkpoint name -> place, for every part of every parameter."""
    places: dict[str, Target] = {}
    for rule in TABLES[spec.architecture]:
        count = spec.num_layers if "{i}" in rule.pattern else 1
        for i in range(len(spec.deepstack_layers) if "deep." in rule.parameter else count):
            parameter = rule.parameter.replace("{i}", str(i))
            # Some kinds of encoder have fewer parts.
            if parameter in wanted and (rule.part or 0) < len(wanted[parameter].parts):
                places[rule.pattern.replace("{i}", str(i))] = Target(parameter, rule.part)
    return places


def canonical_name(name: str) -> str:
    """Return an encoder tensor's name in the tables; other names are returned as they are."""
    found = _OWN.fullmatch(name)
    if found is None:
        return name
    return found[3] or f"{found[1]}.{found[2]}"


def is_vision_tensor(name: str) -> bool:
    """Return whether a tensor belongs to the encoder, not to the text model."""
    return _OWN.fullmatch(name) is not None


def is_skippable(spec: VisionSpec, name: str) -> bool:
    """Return whether a tensor without a place, by its name in the tables, may be skipped."""
    layer = _LAYER.fullmatch(name)
    unread = range(spec.num_layers, spec.num_layers + spec.num_skipped_layers)
    if layer is not None and int(layer[1]) in unread:
        return True
    return not is_vision_tensor(name) or _UNREAD.fullmatch(name) is not None


def vision_parameters(spec: VisionSpec) -> dict[str, Parameter]:
    """Return all parameters of an encoder, by name."""
    hidden, side = spec.hidden_size, spec.patch_size
    frames = () if spec.num_frames is None else (spec.num_frames,)
    # In float32: the pixels are, and the frames' weights are summed.
    is_flat = spec.channels_last or spec.flat_patches
    shape = (3 * (spec.num_frames or 1) * side**2,) if is_flat else (3, *frames, side, side)
    found = {"patch.weight": Parameter((hidden,), shape, is_float32=True)}
    if spec.pixel_norm is not None:
        found["pixel_norm"] = Parameter((3 * side**2,), is_norm=True, is_float32=True)
        found["pixel_norm.bias"] = Parameter((3 * side**2,), is_float32=True)
    if spec.patch_bias:
        found["patch.bias"] = Parameter((hidden,), is_float32=True)
    if spec.num_positions:
        found["positions"] = Parameter((spec.num_positions,), (hidden,), is_float32=True)
    if spec.squared_positions:
        side = spec.position_grid_size
        found["positions"] = Parameter((side,), (side, hidden), is_float32=True)
    if spec.batched_positions:
        found["positions"] = Parameter((1,), (spec.num_positions, hidden), is_float32=True)
    if spec.num_axis_positions:
        first, second = 2, spec.num_axis_positions
        if spec.paired_positions:
            first, second = second, first
        found["positions"] = Parameter((first,), (second, hidden), is_float32=True)
    if spec.class_token:
        shape = (1, 1, hidden) if spec.batched_positions else (hidden,)
        found["class_token"] = Parameter(shape[:1], shape[1:], is_float32=True)
    if spec.patch_norm:
        found |= _norm_parameters("patch_norm", spec.norm, hidden)
    for i in range(spec.num_layers):
        layer = _conv_parameters(spec) if i in spec.conv_layers else _layer_parameters(spec)
        found |= {f"{i}.{name}": parameter for name, parameter in layer.items()}
    if spec.inner_merge is not None:
        found |= _inner_merge_parameters(spec, spec.inner_merge)
    if spec.final_norm:
        found |= _norm_parameters("final_norm", spec.norm, hidden)
    if isinstance(spec.merger, PoolSpec):
        return found | _pool_parameters(spec, spec.merger)
    if isinstance(spec.merger, GatedMergerSpec):
        return found | _gated_merger_parameters(spec, spec.merger)
    if isinstance(spec.merger, AdapterSpec):
        inner = spec.merger.inner_size
        sizes = {"up": (inner, spec.merged_size), "down": (inner, inner)}
        for name, (outputs, inputs) in {**sizes, "projection": (spec.out_size, inner)}.items():
            found |= linear_parameters(f"merger.{name}", (outputs,), inputs, bias=False)
        return found
    if spec.newline:
        found["newline"] = Parameter((spec.out_size,))
    width = spec.merged_size if spec.merger.norm_of_cells else hidden
    found |= _merger_parameters("merger", spec, spec.merger, width)
    for i in range(len(spec.deepstack_layers)):
        found |= _merger_parameters(f"deep.{i}", spec, spec.merger, spec.merged_size)
    return found


def _conv_parameters(spec: VisionSpec) -> dict[str, Parameter]:
    hidden, size = spec.hidden_size, spec.conv_size
    return {
        **_common_parameters(spec),
        **linear_parameters("conv_in", (hidden, hidden, hidden), hidden, bias=False),
        "conv.weight": Parameter((hidden,), (1, size, size)),
        **linear_parameters("output", (hidden,), hidden, bias=False),
    }


def _common_parameters(spec: VisionSpec) -> dict[str, Parameter]:
    """Those of layers of both kinds."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    up = (inner, inner) if spec.gated else (inner,)
    return {
        **_norm_parameters("attention_norm", spec.norm, hidden),
        **_norm_parameters("mlp_norm", spec.norm, hidden),
        **linear_parameters("up", up, hidden, bias=spec.mlp_bias),
        **linear_parameters("down", (hidden,), inner, bias=spec.mlp_bias),
    }


def _layer_parameters(spec: VisionSpec) -> dict[str, Parameter]:
    hidden = spec.hidden_size
    found = {
        **_common_parameters(spec),
        **linear_parameters("qkv", (hidden, spec.kv_size, spec.kv_size), hidden, bias=spec.bias),
        **linear_parameters("output", (hidden,), hidden, bias=spec.bias or spec.output_bias),
    }
    if spec.qk_norm is not None:
        for name in ("query_norm", "key_norm"):
            width = spec.head_dim if spec.qk_norm.by_head else hidden
            found |= _norm_parameters(name, spec.qk_norm, width)
    if spec.layer_scale:
        for name in ("attention_scale", "mlp_scale"):
            found[name] = Parameter((hidden,), is_norm=True)
    if spec.sandwich:
        sizes = {"query_norm": spec.head_dim, "key_norm": spec.head_dim}
        sizes |= {"attention_after": hidden, "mlp_after": hidden}
        for name, size in sizes.items():
            found |= _norm_parameters(name, spec.norm, size)
    if spec.clipped:
        for name, count in (("qkv", 3), ("output", 1), ("up", 1 + spec.gated), ("down", 1)):
            found[f"{name}.bounds"] = Parameter((1,) * (4 * count), is_float32=True)
    return found


def _inner_merge_parameters(spec: VisionSpec, merge: InnerMergeSpec) -> dict[str, Parameter]:
    hidden, length = spec.hidden_size, merge.side**2
    inner = spec.intermediate_size * length
    return {
        **_norm_parameters("inner.attention_norm", spec.norm, hidden),
        **linear_parameters("inner.qkv", (hidden,) * 3, hidden, bias=True),
        **linear_parameters("inner.output", (hidden,), hidden, bias=True),
        **_norm_parameters("inner.norm", spec.norm, hidden * length),
        **linear_parameters("inner.up", (inner,), hidden * length, bias=True),
        **linear_parameters("inner.down", (hidden,), inner, bias=True),
    }


def _pool_parameters(spec: VisionSpec, pool: PoolSpec) -> dict[str, Parameter]:
    hidden, out = spec.hidden_size, spec.out_size
    shape = (hidden, out) if pool.inputs_first else (out, hidden)
    found = {"merger.projection.weight": Parameter(shape[:1], shape[1:])}
    if pool.weighted:
        found["merger.norm"] = Parameter((hidden,), is_float32=True)
    if pool.standardised:
        found["merger.mean"] = Parameter((hidden,), is_float32=True)
        found["merger.scale"] = Parameter((hidden,), is_norm=True, is_float32=True)
    return found


def _gated_merger_parameters(spec: VisionSpec, merger: GatedMergerSpec) -> dict[str, Parameter]:
    out, inner = spec.out_size, merger.inner_size
    join, side = (spec.hidden_size, spec.merge_size, spec.merge_size), (inner, inner)
    return {
        "merger.join.weight": Parameter((out,), join),
        "merger.join.bias": Parameter((out,)),
        "merger.projection.weight": Parameter((out,), (out,)),
        **_norm_parameters("merger.norm", merger.norm, out),
        "merger.up.weight": Parameter(side, (out,)),
        "merger.down.weight": Parameter((out,), (inner,)),
    }


def _merger_parameters(
    name: str, spec: VisionSpec, merger: MergerSpec, norm_size: int
) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    if merger.norm is not None:
        found |= _norm_parameters(f"{name}.norm", merger.norm, norm_size)
    inputs = spec.merged_size
    if merger.joined:
        found[f"{name}.join.weight"] = Parameter((spec.hidden_size,), (inputs,))
        inputs = spec.hidden_size
    inner = merger.inner_size
    if inner is None:
        return found | linear_parameters(f"{name}.up", (spec.out_size,), inputs, bias=merger.bias)
    width = 2 * inner if merger.gated else inner
    found |= linear_parameters(f"{name}.up", (width,), inputs, bias=merger.bias)
    found |= linear_parameters(f"{name}.down", (spec.out_size,), inner, bias=merger.bias)
    return found


def linear_parameters(
    name: str, parts: tuple[int, ...], inputs: int, *, bias: bool
) -> dict[str, Parameter]:
    """Return the parameters of a projection."""
    found = {f"{name}.weight": Parameter(parts, (inputs,))}
    if bias:
        found[f"{name}.bias"] = Parameter(parts)
    return found


def _norm_parameters(name: str, norm: VisionNorm, size: int) -> dict[str, Parameter]:
    found = {name: Parameter((size,), is_norm=True)}
    if norm.kind == "layer":
        found[f"{name}.bias"] = Parameter((size,))
    return found
