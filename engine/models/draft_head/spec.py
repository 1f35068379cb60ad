"""Draft heads as data: their parameters, and checkpoints' names for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.models import weights
from engine.models.spec import DecoderSpec
from engine.models.weights import Parameter, Target

DraftHeadKind = Literal["mtp", "qwen_mtp", "eagle", "eagle3"]


@dataclass(frozen=True)
class DraftHeadSpec:
    """A head of one decoder layer. T is the target model's hidden size, H its own."""

    kind: DraftHeadKind
    layer: DecoderSpec  # its one layer; the vocabulary is the model's
    target_hidden_size: int  # T
    draft_vocab_size: int  # tokens it scores: all, or the most frequent
    aux_layers: tuple[int, ...] = ()  # model layers whose inputs it reads; none: the final norm
    fc_bias: bool = False
    has_embedding: bool = False  # of its own; else the model's
    has_lm_head: bool = False  # its own output matrix; else the model's
    index: int = 0  # of an ``mtp`` layer, after the model's last

    @property
    def architecture(self) -> str:
        """Its name in messages."""
        return f"{self.layer.architecture} {self.kind}"

    @property
    def is_in_target_checkpoint(self) -> bool:
        """Whether its tensors are in the model's checkpoint."""
        return self.kind in ("mtp", "qwen_mtp")


def draft_head_parameters(spec: DraftHeadSpec) -> dict[str, Parameter]:
    """All parameters of a head by name; those of its layer begin with ``0.``"""
    hidden = spec.layer.hidden_size
    found = {
        name: parameter
        for name, parameter in weights.parameters(spec.layer).items()
        if name.startswith("0.")
    }
    num_read = len(spec.aux_layers) * spec.target_hidden_size if spec.aux_layers else 2 * hidden
    found["fc.weight"] = Parameter((hidden,), (num_read,))
    if spec.fc_bias:
        found["fc.bias"] = Parameter((hidden,))
    if not spec.is_in_target_checkpoint:
        del found["0.attention_norm"]
    if spec.kind == "eagle3":
        found["0.qkv.weight"] = Parameter(found["0.qkv.weight"].parts, (2 * hidden,))
    if spec.kind != "eagle":
        for name in ("token_norm", "state_norm", "norm"):
            found[name] = Parameter((hidden,), is_norm=True)
    if spec.has_embedding:
        found["embedding"] = Parameter((spec.layer.vocab_size,), (hidden,))
    if spec.has_lm_head:
        found["head"] = Parameter((spec.draft_vocab_size,), (hidden,))
    return found


def draft_head_targets(spec: DraftHeadSpec, wanted: Mapping[str, Parameter]) -> dict[str, Target]:
    """Where each tensor of a checkpoint goes, by its full name (see ``canonical_name``)."""
    prefix, names = mtp_prefix(spec) if spec.is_in_target_checkpoint else "", _NAMES[spec.kind]
    of_layer = prefix if spec.kind == "mtp" else prefix + "layers.0."
    places = {
        of_layer + name.partition("layers.0.")[2]: target
        for name, target in weights.targets(spec.layer, wanted).items()
        if target.parameter.startswith("0.")
    }
    for name, parameter in names.items():
        if parameter in wanted:
            places[prefix + name] = Target(parameter, 0)
    return places


def mtp_prefix(spec: DraftHeadSpec) -> str:
    """The name prefix of a head's tensors in its model's checkpoint."""
    return "mtp." if spec.kind == "qwen_mtp" else f"model.layers.{spec.index}."


def canonical_name(spec: DraftHeadSpec, name: str) -> str:
    """Return a tensor's full name.

    EAGLE heads are saved with and without ``model.``, and EAGLE-3's layer has two names.
    """
    if spec.is_in_target_checkpoint:
        return name
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def is_skippable(spec: DraftHeadSpec, name: str) -> bool:
    """Return whether a tensor may be skipped: the model's own, computed here, or a token map.

    Token maps are read separately.
    """
    if spec.is_in_target_checkpoint:
        is_foreign = not name.startswith(mtp_prefix(spec))
        # Qwen's model skips everything under this name, and its head nothing.
        return is_foreign or (spec.kind == "mtp" and weights.is_skippable(spec.layer, name))
    return name in TOKEN_MAPS or weights.is_skippable(spec.layer, "model." + name)


# EAGLE-3: the offset of a scored token's id from the model's, and which tokens are scored at all.
TOKEN_MAPS = ("d2t", "t2d")

_MTP = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "token_norm",
    "hnorm.weight": "state_norm",
    "shared_head.norm.weight": "norm",
    "embed_tokens.weight": "embedding",
    "shared_head.head.weight": "head",
}
_QWEN_MTP = {
    "fc.weight": "fc.weight",
    "pre_fc_norm_embedding.weight": "token_norm",
    "pre_fc_norm_hidden.weight": "state_norm",
    "norm.weight": "norm",
    "embed_tokens.weight": "embedding",
}
_EAGLE = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "layers.0.input_layernorm.weight": "token_norm",
    "layers.0.hidden_norm.weight": "state_norm",
    "norm.weight": "norm",
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
}
_NAMES: Mapping[DraftHeadKind, Mapping[str, str]] = {
    "mtp": _MTP,
    "qwen_mtp": _QWEN_MTP,
    "eagle": _EAGLE,
    "eagle3": _EAGLE,
}
