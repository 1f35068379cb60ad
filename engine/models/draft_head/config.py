"""Determine a checkpoint's draft head from its config and its tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from engine.errors import ModelLoadError
from engine.models import weights
from engine.models.config_reader import ConfigReader
from engine.models.draft_head.spec import DraftHeadSpec, canonical_name, mtp_prefix
from engine.models.families import read_spec
from engine.models.json_file import parse_object, read_bytes
from engine.models.spec import DecoderSpec

# Keys of an EAGLE head's config.json beyond those of a decoder.
_OWN_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_config", "bias")
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


def mtp_spec(spec: DecoderSpec, present: Collection[str], where: Path) -> DraftHeadSpec:
    """Return the draft head in a model's own checkpoint.

    Args:
        spec: of the model.
        present: names of its checkpoint's tensors; none if the weights are random.
        where: the model's directory.

    Raises:
        ModelLoadError: it has none.
    """
    if weights.has_qwen_mtp(spec):
        return _qwen_mtp_spec(spec, present, where)
    if spec.num_unread_layers:
        raise ModelLoadError(
            f"{where / 'config.json'}: --speculation mtp is not supported for {spec.architecture}"
        )
    if not spec.num_draft_layers:
        raise ModelLoadError(
            f"{where / 'config.json'}: 'num_nextn_predict_layers' is not set: the model has no "
            "head for --speculation mtp"
        )
    last = replace(spec.layers[-1], experts=spec.moe is not None, shares_selection=False)
    head = DraftHeadSpec(
        kind="mtp",
        layer=replace(spec, layers=(last,), num_draft_layers=0, tie_word_embeddings=False),
        target_hidden_size=spec.hidden_size,
        draft_vocab_size=spec.vocab_size,
        index=spec.num_layers,
    )
    prefix = mtp_prefix(head)
    return replace(
        head,
        has_embedding=f"{prefix}embed_tokens.weight" in present,
        has_lm_head=f"{prefix}shared_head.head.weight" in present,
    )


def _qwen_mtp_spec(spec: DecoderSpec, present: Collection[str], where: Path) -> DraftHeadSpec:
    """That of Qwen3-Next and Qwen3.5: an attention layer, whatever the model's last layer is."""
    if present and "mtp.fc.weight" not in present:
        raise ModelLoadError(
            f"{where}: missing tensor 'mtp.fc.weight': the checkpoint was saved without the head "
            "for --speculation mtp"
        )
    attending = next(layer for layer in reversed(spec.layers) if not layer.recurrent)
    layer = replace(attending, experts=spec.moe is not None)
    return DraftHeadSpec(
        kind="qwen_mtp",
        layer=replace(spec, layers=(layer,), recurrence=None, tie_word_embeddings=False),
        target_hidden_size=spec.hidden_size,
        draft_vocab_size=spec.vocab_size,
        has_embedding="mtp.embed_tokens.weight" in present,
    )


def read_eagle_config(directory: Path, spec: DecoderSpec) -> DraftHeadSpec:
    """Return the EAGLE head that a directory's config.json describes, borrowing all it can.

    Args:
        directory: of the head.
        spec: of the target model.

    Raises:
        ModelLoadError: it is missing, or cannot draft for this model; one line that names the key.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{path}: missing; the directory of an EAGLE head has one")
    config = parse_object(path, read_bytes(path))
    reader = ConfigReader(
        {key: config.pop(key, None) for key in (*_OWN_KEYS, _LAYERS_KEY)}
        | {"architectures": config.get("architectures")},
        str(path),
    )
    try:
        own = read_spec(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{directory / str(error)}") from None
    is_third = "draft_vocab_size" in reader or any(
        "eagle3" in name.lower() for name in reader.texts("architectures")
    )
    if not isinstance(own, DecoderSpec) or own.num_layers != 1 or not _is_plain(own):
        raise ModelLoadError(f"{path}: is not an EAGLE head: it must have one Llama layer")
    _check(path, "vocab_size", own.vocab_size, spec.vocab_size)
    given = reader.count("target_hidden_size", spec.hidden_size)
    if given != spec.hidden_size:
        problem = f"is {given}, the model's hidden size {spec.hidden_size}"
        raise reader.error("target_hidden_size", problem)
    if not is_third:
        _check(path, "hidden_size", own.hidden_size, spec.hidden_size)
    num_scored = reader.count("draft_vocab_size", own.vocab_size)
    if num_scored > own.vocab_size:
        raise reader.error("draft_vocab_size", f"exceeds the {own.vocab_size} tokens")
    reader.flag("bias")  # the tensor's presence decides
    longest = max(own.max_position_embeddings, spec.max_position_embeddings)
    return DraftHeadSpec(
        kind="eagle3" if is_third else "eagle",
        layer=replace(own, max_position_embeddings=longest, tie_word_embeddings=False),
        target_hidden_size=spec.hidden_size,
        draft_vocab_size=num_scored,
        aux_layers=_aux_layers(reader, spec) if is_third else (),
    )


def with_checkpoint_tensors(
    head: DraftHeadSpec, present: Collection[str], where: Path
) -> DraftHeadSpec:
    """Return the head with the matrices of its own that ``present`` shows it has.

    Raises:
        ModelLoadError: it lacks one that it cannot borrow.
    """
    names = {canonical_name(head, name) for name in present}
    head = replace(
        head,
        fc_bias="fc.bias" in names,
        has_embedding="embed_tokens.weight" in names,
        has_lm_head="lm_head.weight" in names,
    )
    hidden, vocab_size = head.layer.hidden_size, head.layer.vocab_size
    if hidden != head.target_hidden_size and not head.has_embedding:
        raise ModelLoadError(
            f"{where}: missing tensor 'embed_tokens.weight': the head's hidden_size is {hidden}, "
            f"the model's {head.target_hidden_size}"
        )
    if not head.has_lm_head and (
        hidden != head.target_hidden_size or head.draft_vocab_size != vocab_size
    ):
        raise ModelLoadError(f"{where}: missing tensor 'lm_head.weight'")
    if head.draft_vocab_size != vocab_size and "d2t" not in names:
        raise ModelLoadError(f"{where}: missing tensor 'd2t', which maps its scores to tokens")
    return head


def _is_plain(own: DecoderSpec) -> bool:
    """Return whether its layer is of a kind that heads have."""
    is_attention = own.latent is None and not own.has_sinks and own.rope is not None
    return is_attention and own.moe is None and own.placement == "pre" and own.norm.kind == "rms"


def _aux_layers(reader: ConfigReader, spec: DecoderSpec) -> tuple[int, ...]:
    """Return the layers whose inputs it reads: from the config, or as EAGLE-3 was published."""
    section, count = reader.section("eagle_config"), spec.num_layers
    for owner in (reader, section):
        if owner is not None and _LAYERS_KEY in owner:
            layers = tuple(sorted(owner.indices(_LAYERS_KEY)))
            if not layers or not all(0 <= layer < count for layer in layers):
                raise owner.error(_LAYERS_KEY, f"must name some of the model's {count} layers")
            return layers
    layers = tuple(sorted({2, count // 2, count - 3}))
    if len(layers) != 3 or layers[0] < 0:
        raise ModelLoadError(f"a model of {count} layers is too small for an EAGLE-3 head")
    return layers


def _check(path: Path, key: str, own: int, models: int) -> None:
    if own != models:
        raise ModelLoadError(f"{path}: '{key}' is {own}, the model's is {models}")
