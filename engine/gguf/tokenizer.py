"""A file's tokenizer, chat template and sampling defaults: what directories have in other files.

Byte-level BPE is stored with its merges and the name of a pre-tokenisation rule, SentencePiece with
a score for each piece. Both become a ``tokenizers.Tokenizer``; neither torch nor transformers is
needed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import ModelLoadError
from engine.gguf.file import GgufFile
from engine.gguf.pretokenizer import DEFAULT_RULE, RULES, PreTokenizerRule
from engine.text.tokenizer import make_backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = logging.getLogger(__name__)

_TOKENS = "tokenizer.ggml.tokens"
_SPACE = "▁"  # SentencePiece's spelling
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_NAMED_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # misspelled in the format
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
# SentencePiece's defaults, for files without them.
_SENTENCEPIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files have no generation_config.json. End-of-turn tokens are recognised by their spelling, as in
# llama.cpp.
_END_SPELLINGS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "<end_of_utterance>"),
        "<｜end▁of▁sentence｜>",
    )
)
# Fields of SamplingParams, and their keys in files.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


class TokenizerParts(NamedTuple):
    """What ``engine.text.tokenizer.Tokenizer`` is made from."""

    backend: Backend
    named_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    add_bos_token: bool | None


def read_tokenizer(file: GgufFile) -> TokenizerParts:
    """Return the tokenizer that the metadata describe.

    Raises:
        ModelLoadError: there is none, it is damaged, or its kind is not supported.
    """
    try:
        return _read_tokenizer(file)
    except ModelLoadError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelLoadError(f"{file.path}: the tokenizer cannot be made: {reason}") from error


def end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end a text or a turn."""
    texts, kind = _texts(file), file.text("tokenizer.ggml.model", "none")
    return _end_ids(file, texts, _types(file), _named_ids(file, kind, len(texts)))


def chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the chat templates' sources by name; ``default`` is the unnamed one."""
    found: dict[str, str] = {}
    for name in file.texts("tokenizer.chat_templates"):
        if f"tokenizer.chat_template.{name}" in file.metadata:
            found[name] = file.text(f"tokenizer.chat_template.{name}")
    if "tokenizer.chat_template" in file.metadata:
        found["default"] = file.text("tokenizer.chat_template")
    return found


def sampling_defaults(file: GgufFile) -> dict[str, Any]:
    """Return the file's defaults for ``SamplingParams`` fields."""
    return {name: file.metadata[key] for name, key in _SAMPLING.items() if key in file.metadata}


def _read_tokenizer(file: GgufFile) -> TokenizerParts:
    kind = file.text("tokenizer.ggml.model", "none")
    make = _KINDS.get(kind)
    if make is None:
        known = ", ".join(sorted(_KINDS))
        raise ModelLoadError(
            f"{file.path}: a tokenizer of kind {kind[:40]!r} is not supported (known: {known})"
        )
    texts, types = _texts(file), _types(file)
    if not texts or len(types) not in (0, len(texts)):
        raise file.error(_TOKENS, f"has {len(texts)} tokens of {len(types)} types")
    ids = _named_ids(file, kind, len(texts))
    named = {name: texts[id_] for name, id_ in ids.items()}
    adds_bos: bool | None = None  # the tokenizer's default
    if "tokenizer.huggingface.json" in file.metadata:
        backend = make_backend(file.text("tokenizer.huggingface.json"))
    else:
        backend = make(file, texts, types, named)
        _add_tokens(backend, texts, types)
        adds_bos = _rule(file).add_bos if kind == "gpt2" else kind == "llama"
    if file.flag("tokenizer.ggml.add_eos_token", False) and "eos_token" in named:
        _append(backend, named["eos_token"])
    if "tokenizer.ggml.add_bos_token" in file.metadata:
        adds_bos = file.flag("tokenizer.ggml.add_bos_token", False)
    return TokenizerParts(backend, named, _end_ids(file, texts, types, ids), adds_bos)


# ---------------------------------------------------------------- kinds


def _byte_level(
    file: GgufFile, texts: list[str], types: list[int], named: dict[str, str]
) -> Backend:
    """Make GPT-2's kind: merges of bytes that are spelled as printable characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {text: id_ for id_, text in enumerate(texts)}
    merges: list[tuple[str, str]] = []
    for merge in file.texts("tokenizer.ggml.merges"):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not {left, right, left + right} <= vocabulary.keys():
            raise file.error("tokenizer.ggml.merges", f"has {merge!r:.60}, which makes no token")
        merges.append((left, right))
    rule = _rule(file)
    if rule is RULES[DEFAULT_RULE]:
        logger.warning(
            "%s does not say how text is cut into words; GPT-2's rule is taken, which may not be "
            "what the model was trained with",
            file.path,
        )
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    if rule.normalize_nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    file: GgufFile, texts: list[str], types: list[int], named: dict[str, str]
) -> Backend:
    """Make Llama 2's and Gemma's kind of tokenizer.

    Two pieces merge if the vocabulary has the result, in order of descending score; characters
    without a piece are encoded as bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _scores(file, texts)
    vocabulary = {text: id_ for id_, text in enumerate(texts)}
    mergeable = {_NORMAL, _USER_DEFINED, _UNUSED}
    pieces = [text for id_, text in enumerate(texts) if not types or types[id_] in mergeable]
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(pieces, vocabulary, scores),
            unk_token=named.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    lead = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*lead, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _unigram(file: GgufFile, texts: list[str], types: list[int], named: dict[str, str]) -> Backend:
    """Make T5's kind: the segmentation with the highest sum of scores (Kudo 2018)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = list(zip(texts, _scores(file, texts), strict=True))
    unknown = named.get("unk_token")
    falls_back = "<0x00>" in texts
    backend = Tokenizer(
        models.Unigram(pieces, texts.index(unknown) if unknown else None, falls_back)
    )
    steps: list[Any] = []
    charsmap = bytes(value & 255 for value in file.numbers("tokenizer.ggml.precompiled_charsmap"))
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if file.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    backend.normalizer = normalizers.Sequence(steps) if steps else None
    prepend = "always" if file.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend)
    backend.decoder = decoders.Metaspace(_SPACE, prepend)
    return backend


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece_bpe, "t5": _unigram}

# ---------------------------------------------------------------- parts


def _merges_by_score(
    pieces: Sequence[str], vocabulary: dict[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form another piece, in SentencePiece's merge order."""
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for piece in pieces:
        id_ = vocabulary[piece]
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[id_], vocabulary[left], (left, right)))
    ranked.sort(key=lambda entry: entry[:2])
    return [pair for _, _, pair in ranked]


def _add_tokens(backend: Backend, texts: list[str], types: list[int]) -> None:
    """Add the tokens that are matched as a whole in any context."""
    from tokenizers import AddedToken

    added, special = [], []
    for text, kind in zip(texts, types, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(text, normalized=False, special=True))
        # Pieces of spaces are found by merges; their spelling does not occur in texts.
        elif kind == _USER_DEFINED and text and _SPACE not in text:
            added.append(AddedToken(text, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(added)


def _append(backend: Backend, text: str) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=["$A", text], special_tokens=[(text, backend.token_to_id(text))]
    )


def _rule(file: GgufFile) -> PreTokenizerRule:
    name = file.text("tokenizer.ggml.pre", "default")
    rule = RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(RULES))
        raise file.error("tokenizer.ggml.pre", f"is {name[:40]!r}; known: {known}")
    return rule


def _texts(file: GgufFile) -> list[str]:
    return file.texts(_TOKENS)


def _types(file: GgufFile) -> list[int]:
    return file.numbers("tokenizer.ggml.token_type")


def _scores(file: GgufFile, texts: list[str]) -> list[float]:
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(texts):
        raise file.error("tokenizer.ggml.scores", f"has {len(scores)} for {len(texts)} tokens")
    return [float(score) for score in scores]


def _named_ids(file: GgufFile, kind: str, count: int) -> dict[str, int]:
    found = dict(_SENTENCEPIECE_IDS) if kind == "llama" and count > 2 else {}
    for name, key in _NAMED_IDS.items():
        if key in file.metadata:
            found[name] = _id(file, key, count)
    return found


def _end_ids(
    file: GgufFile, texts: list[str], types: list[int], named: dict[str, int]
) -> tuple[int, ...]:
    keys = (f"tokenizer.ggml.{name}" for name in _END_IDS)
    found = {_id(file, key, len(texts)) for key in keys if key in file.metadata}
    if "eos_token" in named:
        found.add(named["eos_token"])
    special = {_CONTROL, _USER_DEFINED}
    for id_, (text, kind) in enumerate(zip(texts, types, strict=False)):
        if kind in special and text in _END_SPELLINGS:
            found.add(id_)
    return tuple(sorted(found))


def _id(file: GgufFile, key: str, count: int) -> int:
    value = file.metadata[key]
    if type(value) is not int or not 0 <= value < count:
        raise file.error(key, f"must be one of {count} tokens, not {value!r:.40}")
    return value
