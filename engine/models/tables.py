"""Where every tensor of a checkpoint goes, for any kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine.models import weights
from engine.models.audio import weights as audio
from engine.models.audio.spec import AudioSpec
from engine.models.dense_spec import DenseSpec
from engine.models.draft_head import spec as draft_head
from engine.models.draft_head.spec import DraftHeadSpec
from engine.models.encoder.spec import EncoderSpec
from engine.models.encoder.weights import (
    canonical_name,
    encoder_parameters,
    encoder_targets,
    is_skippable,
)
from engine.models.names import rules_of
from engine.models.spec import DecoderSpec
from engine.models.spelling import speller
from engine.models.vision import weights as vision
from engine.models.vision.spec import VisionSpec
from engine.models.weights import Parameter, Target

Spec = DecoderSpec | EncoderSpec | DraftHeadSpec | VisionSpec | AudioSpec | DenseSpec


class TensorTables(NamedTuple):
    """The loader's knowledge of a model."""

    parameters: dict[str, Parameter]
    targets: Mapping[str, Target]  # by a tensor's name in a whole model
    full_name: Callable[[str], str]  # of a tensor in a checkpoint of a part
    is_skippable: Callable[[str], bool]  # whether a tensor without a place may be skipped


def tables_of(spec: Spec) -> TensorTables:
    """Return the tables of the model that ``spec`` describes."""
    if isinstance(spec, EncoderSpec):
        wanted = encoder_parameters(spec)
        return TensorTables(
            wanted,
            encoder_targets(spec, wanted),
            canonical_name,
            lambda name: is_skippable(spec, name),
        )
    if isinstance(spec, DraftHeadSpec):
        wanted = draft_head.draft_head_parameters(spec)
        return TensorTables(
            wanted,
            draft_head.draft_head_targets(spec, wanted),
            lambda name: draft_head.canonical_name(spec, name),
            lambda name: draft_head.is_skippable(spec, name),
        )
    if isinstance(spec, VisionSpec):
        wanted = vision.vision_parameters(spec)
        return TensorTables(
            wanted,
            vision.vision_targets(spec, wanted),
            vision.canonical_name,
            lambda name: vision.is_skippable(spec, name),
        )
    if isinstance(spec, AudioSpec):
        wanted = audio.audio_parameters(spec)
        return TensorTables(
            wanted,
            audio.audio_targets(spec, wanted),
            audio.canonical_name,
            lambda name: not audio.is_own(name),
        )
    if isinstance(spec, DenseSpec):
        return _dense_tables(spec)
    return _decoder_tables(spec)


def layout_spec(spec: Spec) -> DecoderSpec:
    """Return the decoder whose heads and experts the layouts refer to; encoders have neither."""
    decoder = spec.layer if isinstance(spec, DraftHeadSpec) else spec
    assert isinstance(decoder, DecoderSpec)
    return decoder


def _dense_tables(spec: DenseSpec) -> TensorTables:
    wanted = {"linear.weight": Parameter((spec.outputs,), (spec.inputs,), is_float32=True)}
    if spec.bias:
        wanted["linear.bias"] = Parameter((spec.outputs,), is_float32=True)
    targets = {name: Target(name, 0) for name in wanted}
    return TensorTables(wanted, targets, lambda name: name, lambda _: False)


def _decoder_tables(spec: DecoderSpec) -> TensorTables:
    wanted = weights.parameters(spec)
    targets = weights.targets(spec, wanted)
    prefix = weights.base_prefix(spec)
    spell = speller(rules_of(spec.naming or spec.architecture))

    def full_name(name: str) -> str:
        name = name if name in targets else spell(name)
        is_full = name in targets or name.startswith(prefix) or weights.is_skippable(spec, name)
        return name if is_full else prefix + name

    return TensorTables(wanted, targets, full_name, lambda name: weights.is_skippable(spec, name))
