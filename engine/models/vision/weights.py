"""The parameters of a vision encoder, and checkpoints' names for them: one table per family."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.models.rules import Rule
from engine.models.vision.spec import MergerSpec, PoolSpec, VisionNorm, VisionSpec
from engine.models.weights import Parameter, Target


def _linear(pattern: str, parameter: str, part: int = 0) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{pattern}.{kind}", f"{parameter}.{kind}", part) for kind in ("weight", "bias")
    )


def _norm(pattern: str, parameter: str) -> tuple[Rule, ...]:
    return Rule(f"{pattern}.weight", parameter), Rule(f"{pattern}.bias", f"{parameter}.bias")


def _clipped(pattern: str, parameter: str, part: int = 0) -> tuple[Rule, ...]:
    """A projection and, if it has them, the bounds of its inputs and outputs."""
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return (
        Rule(f"{pattern}.linear.weight", f"{parameter}.weight", part),
        *(
            Rule(f"{pattern}.{bound}", f"{parameter}.bounds", len(bounds) * part + i)
            for i, bound in enumerate(bounds)
        ),
    )


_QWEN_BLOCK = "visual.blocks.{i}."
_QWEN = (
    *_linear("visual.patch_embed.proj", "patch"),
    *_norm(_QWEN_BLOCK + "norm1", "{i}.attention_norm"),
    Rule(_QWEN_BLOCK + "attn.qkv.weight", "{i}.qkv.weight", None),
    Rule(_QWEN_BLOCK + "attn.qkv.bias", "{i}.qkv.bias", None),
    *_linear(_QWEN_BLOCK + "attn.proj", "{i}.output"),
    *_norm(_QWEN_BLOCK + "norm2", "{i}.mlp_norm"),
)
_QWEN2_MERGER = (
    *_norm("visual.merger.ln_q", "merger.norm"),
    *_linear("visual.merger.mlp.0", "merger.up"),
    *_linear("visual.merger.mlp.2", "merger.down"),
)
_QWEN2 = (
    *(*_QWEN, *_QWEN2_MERGER),
    *_linear(_QWEN_BLOCK + "mlp.fc1", "{i}.up"),
    *_linear(_QWEN_BLOCK + "mlp.fc2", "{i}.down"),
)
_QWEN2_5 = (
    *(*_QWEN, *_QWEN2_MERGER),
    *_linear(_QWEN_BLOCK + "mlp.gate_proj", "{i}.up", 0),
    *_linear(_QWEN_BLOCK + "mlp.up_proj", "{i}.up", 1),
    *_linear(_QWEN_BLOCK + "mlp.down_proj", "{i}.down"),
)
_DEEP = "visual.deepstack_merger_list.{i}."
_QWEN3 = (
    *_QWEN,
    Rule("visual.pos_embed.weight", "positions"),
    *_linear(_QWEN_BLOCK + "mlp.linear_fc1", "{i}.up"),
    *_linear(_QWEN_BLOCK + "mlp.linear_fc2", "{i}.down"),
    *_norm("visual.merger.norm", "merger.norm"),
    *_linear("visual.merger.linear_fc1", "merger.up"),
    *_linear("visual.merger.linear_fc2", "merger.down"),
    *_norm(_DEEP + "norm", "deep.{i}.norm"),
    *_linear(_DEEP + "linear_fc1", "deep.{i}.up"),
    *_linear(_DEEP + "linear_fc2", "deep.{i}.down"),
)
_PIXTRAL_LAYER = "vision_tower.transformer.layers.{i}."
_MISTRAL3 = (
    Rule("vision_tower.patch_conv.weight", "patch.weight"),
    Rule("vision_tower.ln_pre.weight", "patch_norm"),
    Rule(_PIXTRAL_LAYER + "attention_norm.weight", "{i}.attention_norm"),
    Rule(_PIXTRAL_LAYER + "attention.q_proj.weight", "{i}.qkv.weight", 0),
    Rule(_PIXTRAL_LAYER + "attention.k_proj.weight", "{i}.qkv.weight", 1),
    Rule(_PIXTRAL_LAYER + "attention.v_proj.weight", "{i}.qkv.weight", 2),
    Rule(_PIXTRAL_LAYER + "attention.o_proj.weight", "{i}.output.weight"),
    Rule(_PIXTRAL_LAYER + "ffn_norm.weight", "{i}.mlp_norm"),
    Rule(_PIXTRAL_LAYER + "feed_forward.gate_proj.weight", "{i}.up.weight", 0),
    Rule(_PIXTRAL_LAYER + "feed_forward.up_proj.weight", "{i}.up.weight", 1),
    Rule(_PIXTRAL_LAYER + "feed_forward.down_proj.weight", "{i}.down.weight"),
    Rule("multi_modal_projector.norm.weight", "merger.norm"),
    Rule("multi_modal_projector.patch_merger.merging_layer.weight", "merger.join.weight"),
    *_linear("multi_modal_projector.linear_1", "merger.up"),
    *_linear("multi_modal_projector.linear_2", "merger.down"),
)
_TOWER_LAYER = "vision_tower.encoder.layers.{i}."
_CLIP = (  # and SigLIP
    Rule("vision_tower.embeddings.class_embedding", "class_token"),
    *_linear("vision_tower.embeddings.patch_embedding", "patch"),
    Rule("vision_tower.embeddings.position_embedding.weight", "positions"),
    *_norm("vision_tower.pre_layrnorm", "patch_norm"),
    *_norm(_TOWER_LAYER + "layer_norm1", "{i}.attention_norm"),
    *_linear(_TOWER_LAYER + "self_attn.q_proj", "{i}.qkv", 0),
    *_linear(_TOWER_LAYER + "self_attn.k_proj", "{i}.qkv", 1),
    *_linear(_TOWER_LAYER + "self_attn.v_proj", "{i}.qkv", 2),
    *_linear(_TOWER_LAYER + "self_attn.out_proj", "{i}.output"),
    *_norm(_TOWER_LAYER + "layer_norm2", "{i}.mlp_norm"),
    *_linear(_TOWER_LAYER + "mlp.fc1", "{i}.up"),
    *_linear(_TOWER_LAYER + "mlp.fc2", "{i}.down"),
    *_norm("vision_tower.post_layernorm", "final_norm"),
)
_LLAVA = (*_MISTRAL3, *_CLIP)
_GEMMA3 = (
    *_CLIP,
    Rule("multi_modal_projector.mm_soft_emb_norm.weight", "merger.norm"),
    Rule("multi_modal_projector.mm_input_projection_weight", "merger.projection.weight"),
)
_GEMMA4 = (
    Rule("vision_tower.patch_embedder.input_proj.weight", "patch.weight"),
    Rule("vision_tower.patch_embedder.position_embedding_table", "positions", None),
    Rule(_TOWER_LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    *_clipped(_TOWER_LAYER + "self_attn.q_proj", "{i}.qkv", 0),
    *_clipped(_TOWER_LAYER + "self_attn.k_proj", "{i}.qkv", 1),
    *_clipped(_TOWER_LAYER + "self_attn.v_proj", "{i}.qkv", 2),
    Rule(_TOWER_LAYER + "self_attn.q_norm.weight", "{i}.query_norm"),
    Rule(_TOWER_LAYER + "self_attn.k_norm.weight", "{i}.key_norm"),
    *_clipped(_TOWER_LAYER + "self_attn.o_proj", "{i}.output"),
    Rule(_TOWER_LAYER + "post_attention_layernorm.weight", "{i}.attention_after"),
    Rule(_TOWER_LAYER + "pre_feedforward_layernorm.weight", "{i}.mlp_norm"),
    *_clipped(_TOWER_LAYER + "mlp.gate_proj", "{i}.up", 0),
    *_clipped(_TOWER_LAYER + "mlp.up_proj", "{i}.up", 1),
    *_clipped(_TOWER_LAYER + "mlp.down_proj", "{i}.down"),
    Rule(_TOWER_LAYER + "post_feedforward_layernorm.weight", "{i}.mlp_after"),
    Rule("vision_tower.std_bias", "merger.mean"),
    Rule("vision_tower.std_scale", "merger.scale"),
    Rule("embed_vision.embedding_projection.weight", "merger.projection.weight"),
)
_IDEFICS3 = (
    *(
        rule._replace(pattern=rule.pattern.replace("vision_tower.", "vision_model.", 1))
        for rule in _CLIP
    ),
    Rule("connector.modality_projection.proj.weight", "merger.up.weight"),
)
_INTERN_LAYER = "vision_tower.encoder.layer.{i}."
_INTERNVL = (
    Rule("vision_tower.embeddings.cls_token", "class_token", None),
    *_linear("vision_tower.embeddings.patch_embeddings.projection", "patch"),
    Rule("vision_tower.embeddings.position_embeddings", "positions", None),
    *_norm(_INTERN_LAYER + "layernorm_before", "{i}.attention_norm"),
    *_linear(_INTERN_LAYER + "attention.q_proj", "{i}.qkv", 0),
    *_linear(_INTERN_LAYER + "attention.k_proj", "{i}.qkv", 1),
    *_linear(_INTERN_LAYER + "attention.v_proj", "{i}.qkv", 2),
    Rule(_INTERN_LAYER + "attention.q_norm.weight", "{i}.query_norm"),
    Rule(_INTERN_LAYER + "attention.k_norm.weight", "{i}.key_norm"),
    *_linear(_INTERN_LAYER + "attention.projection_layer", "{i}.output"),
    Rule(_INTERN_LAYER + "lambda_1", "{i}.attention_scale"),
    *_norm(_INTERN_LAYER + "layernorm_after", "{i}.mlp_norm"),
    *_linear(_INTERN_LAYER + "mlp.fc1", "{i}.up"),
    *_linear(_INTERN_LAYER + "mlp.fc2", "{i}.down"),
    Rule(_INTERN_LAYER + "lambda_2", "{i}.mlp_scale"),
    *_norm("multi_modal_projector.layer_norm", "merger.norm"),
    *_linear("multi_modal_projector.linear_1", "merger.up"),
    *_linear("multi_modal_projector.linear_2", "merger.down"),
)
_TABLES = {
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "idefics3": _IDEFICS3,
    "internvl": _INTERNVL,
    "llava": _LLAVA,
    "mistral3": _MISTRAL3,
    "qwen2_5_vl": _QWEN2_5,
    "qwen2_vl": _QWEN2,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": _IDEFICS3,
}
# Prefixes of an encoder's names; newer exports put the whole model's name before them, and older
# ones nest another inside.
_OWN = re.compile(
    r"(?:model\.)?"
    r"(visual|vision_tower|vision_model|multi_modal_projector|connector|embed_vision)\."
    r"(?:vision_model\.)?(.*)",
    re.DOTALL,
)
# Modules after the features that are used, and a table that is computed instead.
_UNREAD = re.compile(
    r"vision_tower\.(?:post_layernorm\..*|head\..*)"
    r"|vision_(?:tower|model)\.embeddings\.position_ids"
)
_LAYER = re.compile(r"vision_tower\.encoder\.layers\.(\d{1,5})\..*")


def vision_targets(spec: VisionSpec, wanted: Mapping[str, Parameter]) -> dict[str, Target]:
    """Return checkpoint name -> place, for every part of every parameter."""
    places: dict[str, Target] = {}
    for rule in _TABLES[spec.architecture]:
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
    return f"{found[1]}.{found[2]}" if found else name


def is_text_tensor(name: str) -> bool:
    """Return whether a tensor belongs to the text model, not to the encoder."""
    return _OWN.fullmatch(name) is None


def is_skippable(spec: VisionSpec, name: str) -> bool:
    """Return whether a tensor without a place, by its name in the tables, may be skipped."""
    layer = _LAYER.fullmatch(name)
    unread = range(spec.num_layers, spec.num_layers + spec.num_skipped_layers)
    if layer is not None and int(layer[1]) in unread:
        return True
    return is_text_tensor(name) or _UNREAD.fullmatch(name) is not None


def vision_parameters(spec: VisionSpec) -> dict[str, Parameter]:
    """Return all parameters of an encoder, by name."""
    hidden, side = spec.hidden_size, spec.patch_size
    frames = () if spec.num_frames is None else (spec.num_frames,)
    # In float32: the pixels are, and the frames' weights are summed.
    shape = (3 * side**2,) if spec.channels_last else (3, *frames, side, side)
    found = {"patch.weight": Parameter((hidden,), shape, is_float32=True)}
    if spec.patch_bias:
        found["patch.bias"] = Parameter((hidden,), is_float32=True)
    if spec.num_positions:
        found["positions"] = Parameter((spec.num_positions,), (hidden,), is_float32=True)
    if spec.batched_positions:
        found["positions"] = Parameter((1,), (spec.num_positions, hidden), is_float32=True)
    if spec.num_axis_positions:
        found["positions"] = Parameter((2,), (spec.num_axis_positions, hidden), is_float32=True)
    if spec.class_token:
        shape = (1, 1, hidden) if spec.batched_positions else (hidden,)
        found["class_token"] = Parameter(shape[:1], shape[1:], is_float32=True)
    if spec.patch_norm:
        found |= _norm_parameters("patch_norm", spec.norm, hidden)
    for i in range(spec.num_layers):
        layer = _layer_parameters(spec)
        found |= {f"{i}.{name}": parameter for name, parameter in layer.items()}
    if spec.final_norm:
        found |= _norm_parameters("final_norm", spec.norm, hidden)
    if isinstance(spec.merger, PoolSpec):
        return found | _pool_parameters(spec, spec.merger)
    width = spec.merged_size if spec.merger.norm_of_cells else hidden
    found |= _merger_parameters("merger", spec, spec.merger, width)
    for i in range(len(spec.deepstack_layers)):
        found |= _merger_parameters(f"deep.{i}", spec, spec.merger, spec.merged_size)
    return found


def _layer_parameters(spec: VisionSpec) -> dict[str, Parameter]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    up = (inner, inner) if spec.gated else (inner,)
    found = {
        **_norm_parameters("attention_norm", spec.norm, hidden),
        **_linear_parameters("qkv", (hidden, hidden, hidden), hidden, bias=spec.bias),
        **_linear_parameters("output", (hidden,), hidden, bias=spec.bias or spec.output_bias),
        **_norm_parameters("mlp_norm", spec.norm, hidden),
        **_linear_parameters("up", up, hidden, bias=spec.mlp_bias),
        **_linear_parameters("down", (hidden,), inner, bias=spec.mlp_bias),
    }
    if spec.qk_norm is not None:
        for name in ("query_norm", "key_norm"):
            found |= _norm_parameters(name, spec.qk_norm, hidden)
    if spec.layer_scale:
        for name in ("attention_scale", "mlp_scale"):
            found[name] = Parameter((hidden,), is_norm=True)
    if spec.sandwich:
        sizes = {"query_norm": spec.head_dim, "key_norm": spec.head_dim}
        sizes |= {"attention_after": hidden, "mlp_after": hidden}
        for name, size in sizes.items():
            found |= _norm_parameters(name, spec.norm, size)
    if spec.clipped:
        for name, count in (("qkv", 3), ("output", 1), ("up", len(up)), ("down", 1)):
            found[f"{name}.bounds"] = Parameter((1,) * (4 * count), is_float32=True)
    return found


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
        return found | _linear_parameters(f"{name}.up", (spec.out_size,), inputs, bias=merger.bias)
    found |= _linear_parameters(f"{name}.up", (inner,), inputs, bias=merger.bias)
    found |= _linear_parameters(f"{name}.down", (spec.out_size,), inner, bias=merger.bias)
    return found


def _linear_parameters(
    name: str, parts: tuple[int, ...], inputs: int, *, bias: bool
) -> dict[str, Parameter]:
    found = {f"{name}.weight": Parameter(parts, (inputs,))}
    if bias:
        found[f"{name}.bias"] = Parameter(parts)
    return found


def _norm_parameters(name: str, norm: VisionNorm, size: int) -> dict[str, Parameter]:
    found = {name: Parameter((size,), is_norm=True)}
    if norm.kind == "layer":
        found[f"{name}.bias"] = Parameter((size,))
    return found
