"""The parameters of audio encoders, and where a checkpoint's tensors go."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.models.audio.spec import AudioSpec, FrameConvSpec
from engine.models.rules import Rule
from engine.models.vision.names import linear_rules, norm_rules
from engine.models.vision.weights import linear_parameters
from engine.models.weights import Parameter, Target

_LAYER = "audio_tower.layers.{i}."
_WHISPER = (
    *linear_rules("audio_tower.conv1", "conv.0"),
    *linear_rules("audio_tower.conv2", "conv.1"),
    Rule("audio_tower.embed_positions.weight", "positions"),
    Rule(_LAYER + "self_attn.q_proj.weight", "{i}.qkv.weight", 0),
    Rule(_LAYER + "self_attn.k_proj.weight", "{i}.qkv.weight", 1),
    Rule(_LAYER + "self_attn.v_proj.weight", "{i}.qkv.weight", 2),
    Rule(_LAYER + "self_attn.q_proj.bias", "{i}.query.bias"),
    Rule(_LAYER + "self_attn.v_proj.bias", "{i}.value.bias"),
)
_QWEN3 = (
    *linear_rules("audio_tower.conv2d1", "conv.0"),
    *linear_rules("audio_tower.conv2d2", "conv.1"),
    *linear_rules("audio_tower.conv2d3", "conv.2"),
    Rule("audio_tower.conv_out.weight", "join.weight"),
    *linear_rules(_LAYER + "self_attn.q_proj", "{i}.qkv", 0),
    *linear_rules(_LAYER + "self_attn.k_proj", "{i}.qkv", 1),
    *linear_rules(_LAYER + "self_attn.v_proj", "{i}.qkv", 2),
    *norm_rules("audio_tower.ln_post", "final_norm"),
)
_RULES = (
    *norm_rules(_LAYER + "self_attn_layer_norm", "{i}.attention_norm"),
    *linear_rules(_LAYER + "self_attn.out_proj", "{i}.output"),
    *norm_rules(_LAYER + "final_layer_norm", "{i}.mlp_norm"),
    *linear_rules(_LAYER + "fc1", "{i}.up"),
    *linear_rules(_LAYER + "fc2", "{i}.down"),
    *norm_rules("audio_tower.layer_norm", "final_norm"),
    *linear_rules("multi_modal_projector.linear", "projector.up"),
    *linear_rules("multi_modal_projector.linear_1", "projector.up"),
    *linear_rules("multi_modal_projector.linear_2", "projector.down"),
)
# Exporters differ in whether the outer model's name comes first.
_OWN = re.compile(r"(?:model\.)?((?:audio_tower|multi_modal_projector)\..*)", re.DOTALL)
_WHISPERS_OWN = re.compile(r"model\.encoder\.(.*)", re.DOTALL)


def audio_parameters(spec: AudioSpec) -> dict[str, Parameter]:
    """Return all parameters of an encoder, by name."""
    hidden = spec.hidden_size
    found = _convolution_parameters(spec)
    for i in range(spec.num_layers):
        found |= {f"{i}.{name}": parameter for name, parameter in _layer_parameters(spec).items()}
    found |= _norm_parameters("final_norm", hidden)
    projector = spec.projector
    if projector is None:
        return found
    bias = projector.bias
    inner = projector.inner_size or spec.out_size
    found |= linear_parameters("projector.up", (inner,), spec.merged_size, bias=bias)
    if projector.inner_size is not None:
        found |= linear_parameters("projector.down", (spec.out_size,), inner, bias=bias)
    return found


def audio_targets(spec: AudioSpec, wanted: Mapping[str, Parameter]) -> dict[str, Target]:
    """Return checkpoint name -> place, for every part of every parameter."""
    rules = _WHISPER if isinstance(spec.convolutions, FrameConvSpec) else _QWEN3
    places: dict[str, Target] = {}
    for rule in (*rules, *_RULES):
        for i in range(spec.num_layers if "{i}" in rule.pattern else 1):
            parameter = rule.parameter.replace("{i}", str(i))
            if parameter in wanted:
                places[rule.pattern.replace("{i}", str(i))] = Target(parameter, rule.part)
    return places


def canonical_name(name: str) -> str:
    """Return an encoder tensor's name in the tables; other names are returned as they are."""
    if found := _WHISPERS_OWN.fullmatch(name):
        return f"audio_tower.{found[1]}"
    found = _OWN.fullmatch(name)
    return found[1] if found else name


def is_own(name: str) -> bool:
    """Return whether a tensor belongs to the encoder."""
    return canonical_name(name) != name or _OWN.fullmatch(name) is not None


def _convolution_parameters(spec: AudioSpec) -> dict[str, Parameter]:
    hidden, convolutions = spec.hidden_size, spec.convolutions
    if isinstance(convolutions, FrameConvSpec):
        shapes = [(hidden, spec.mel.num_mels, 3), (hidden, hidden, 3)]
        positions = Parameter((convolutions.num_positions,), (hidden,), is_float32=True)
        found = {"positions": positions}
    else:
        channels = convolutions.channels
        shapes = [(channels, 1, 3, 3), *[(channels, channels, 3, 3)] * 2]
        height = spec.mel.num_mels
        for _ in shapes:
            height = (height + 1) // 2
        found = {"join.weight": Parameter((hidden,), (channels * height,))}
    for number, (outputs, *trailing) in enumerate(shapes):
        found[f"conv.{number}.weight"] = Parameter((outputs,), tuple(trailing))
        found[f"conv.{number}.bias"] = Parameter((outputs,))
    return found


def _layer_parameters(spec: AudioSpec) -> dict[str, Parameter]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    found = {
        **_norm_parameters("attention_norm", hidden),
        **linear_parameters("qkv", (hidden,) * 3, hidden, bias=spec.key_bias),
        **linear_parameters("output", (hidden,), hidden, bias=True),
        **_norm_parameters("mlp_norm", hidden),
        **linear_parameters("up", (inner,), hidden, bias=True),
        **linear_parameters("down", (hidden,), inner, bias=True),
    }
    if not spec.key_bias:
        found |= {"query.bias": Parameter((hidden,)), "value.bias": Parameter((hidden,))}
    return found


def _norm_parameters(name: str, size: int) -> dict[str, Parameter]:
    return {name: Parameter((size,), is_norm=True), f"{name}.bias": Parameter((size,))}
