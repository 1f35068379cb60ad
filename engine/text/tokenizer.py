"""The tokenizer: converts text to token ids and back, with the exact bytes of every token.

Special tokens are distinguished from text that merely spells them by the *joint*: a random
private-use word that is added to the tokenizer as a token and removed from every result. Inserted
into a spelling such as ``<|im_end|>``, it keeps the tokenizer from recognising a special token
there, while everything else is tokenised as usual. Clients cannot know the joint.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidParameter, ModelLoadError
from engine.gguf.file import find_gguf, read_gguf
from engine.lfs_pointer import refuse_lfs_pointer
from engine.text import tekken_file, tiktoken_file
from engine.text.pieces import PieceRules, read_rules
from engine.text.tokenizer_files import (
    adds_eos,
    read_eos_token_ids,
    read_json,
    read_named_tokens,
    read_special_tokens,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# The library keeps the interpreter's lock while it encodes one text, and releases it for a batch. A
# longer text is therefore a batch of one, so that other threads run meanwhile.
_MAX_HELD_CHARS = 4096


class Tokenizer:
    """A model's tokenizer. Immutable once made, and thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: dict[str, str] | None = None,
        special_tokens: Iterable[str] = (),
        eos_token_ids: Iterable[int] = (),
        add_bos_token: bool | None = None,
        ends_with_eos: bool = False,
    ) -> None:
        """Wrap a ``tokenizers.Tokenizer``, which is modified and must not be used elsewhere.

        Args:
            backend: the tokenizer as read from its file.
            named_tokens: spellings by name, such as ``{"bos_token": "<s>"}``.
            special_tokens: further spellings of special tokens.
            eos_token_ids: ids that end a text, besides the named ``eos_token``.
            add_bos_token: whether encoding adds bos; None leaves it to the backend.
            ends_with_eos: whether a whole text ends with eos; see ``text_end_id``.

        Raises:
            ModelLoadError: the decoder is of an unsupported kind.
        """
        self.named_tokens = dict(named_tokens or {})
        specials = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
        specials |= set(self.named_tokens.values()) | set(special_tokens)
        self._special_ids_by_text = _register_special_tokens(backend, specials)
        self.special_ids = frozenset(self._special_ids_by_text.values())
        self._added = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
        entries = backend.get_vocab_size(with_added_tokens=True)
        self.vocab_size: int = max(entries, max(self._added, default=-1) + 1)
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *(() if eos is None else (eos,))}))
        self._add_bos_token = add_bos_token if self.bos_token_id is not None else None
        # What stands behind a text that is read whole, to be pooled. A text that is continued has
        # none, and ``encode`` does not add it.
        self.text_end_id: int | None = eos if ends_with_eos else None
        self.rules: PieceRules = read_rules(_decoder_state(backend.decoder))
        self._bytes: dict[int, bytes] = {}
        self._backend = backend

        self._guard_text = "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(8))
        self._guard_id = _add_guard_token(backend, self._guard_text)
        spellings = sorted(self._special_ids_by_text)
        self._spelling = re.compile(_prefix_pattern(spellings) if spellings else r"(?!)")
        self._first_chars = {text[0] for text in spellings}
        self._prefixes = {text[:end] for text in spellings for end in range(1, len(text))}
        self._longest_prefix = max(map(len, self._prefixes), default=0)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a model directory in Hugging Face format, or of a GGUF file.

        Raises:
            ModelLoadError: it is missing, damaged or of an unsupported kind.
        """
        gguf = find_gguf(path)
        if gguf is not None:
            return cls._from_gguf(gguf)
        root = Path(path)
        config = read_json(root / "tokenizer_config.json")
        backend = _load_backend(root)
        named = read_named_tokens(root)
        if (root / tekken_file.NAME).is_file() and not (root / "tokenizer.json").is_file():
            named = tekken_file.NAMED_TOKENS | named
            config = {"add_bos_token": True, **config}
        try:
            return cls(
                backend,
                named_tokens=named,
                special_tokens=read_special_tokens(root),
                eos_token_ids=read_eos_token_ids(root),
                add_bos_token=config.get("add_bos_token"),
                ends_with_eos=adds_eos(config),
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"{root}: {error}") from error

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        from engine.gguf.tokenizer import read_tokenizer  # it imports this module

        parts = read_tokenizer(read_gguf(path))
        return cls(
            parts.backend,
            named_tokens=parts.named_tokens,
            eos_token_ids=parts.eos_token_ids,
            add_bos_token=parts.add_bos_token,
        )

    # ------------------------------------------------------------ text to ids

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """The token ids of ``text``.

        Args:
            text: any text; spellings of special tokens are plain text unless ``parse_special``.
            add_special_tokens: add the tokens that the tokenizer puts around a text, such as bos.
            parse_special: convert spellings of special tokens to those tokens.

        Raises:
            InvalidParameter: ``text`` contains a lone surrogate.
        """
        prepared = text if parse_special else self.guard(text)
        return self._post_process(
            _encode(self._backend, prepared, add_special_tokens), add_special_tokens
        )

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The token ids of each text, as from ``encode``, computed in parallel.

        Spellings of special tokens are plain text.
        """
        prepared = [self.guard(text) for text in texts]
        for text in prepared:
            _check_encodable(text)
        encodings = self._backend.encode_batch_fast(prepared, add_special_tokens=add_special_tokens)
        return [self._post_process(encoding.ids, add_special_tokens) for encoding in encodings]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int | None]]:
        """Encode each pair of texts as one prompt, with the special tokens around and between them.

        Returns:
            For each pair its token ids, and the index where those of the second text (token type
            1) begin, or None if the tokenizer has only one token type.

        Raises:
            InvalidParameter: a text contains a lone surrogate.
        """
        prepared = [(self.guard(first), self.guard(second)) for first, second in pairs]
        for pair in prepared:
            for text in pair:
                _check_encodable(text)
        found: list[tuple[list[int], int | None]] = []
        for encoding in self._backend.encode_batch(prepared):
            ids = self._post_process(encoding.ids, True)
            of_second = [
                id_
                for id_, kind in zip(encoding.ids, encoding.type_ids, strict=True)
                if kind == 1 and id_ != self._guard_id
            ]
            found.append((ids, len(ids) - len(of_second) if of_second else None))
        return found

    def guard(self, text: str) -> str:
        """Protect spellings of special tokens in ``text`` from being recognised as such.

        Text without such spellings is returned unchanged, so plain text costs only a scan. The
        beginning of a spelling at the end of the text is protected too, since text appended later
        could complete it.
        """
        if any(char in text for char in self._first_chars):
            while self._spelling.search(text):  # the rest of one spelling can form another
                text = self._spelling.sub(lambda m: m[0][:1] + self._guard_text + m[0][1:], text)
            longest = min(self._longest_prefix, len(text))
            if any(text[-size:] in self._prefixes for size in range(1, longest + 1)):
                text += self._guard_text
        return text

    # ------------------------------------------------------------ ids to text

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        continuation: bool = False,
    ) -> str:
        """The text of ``token_ids``; invalid UTF-8 becomes U+FFFD.

        The result is that of the Hugging Face decoder, without its clean-up of spaces before
        punctuation, which would change what the model wrote.

        Args:
            token_ids: ids below ``vocab_size``; those without an entry have no text.
            skip_special_tokens: omit special tokens.
            continuation: the text continues another one, so keep a leading space that the
                vocabulary puts before the first word of a text.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(id_) for id_ in token_ids if id_ not in skipped)
        text = data.decode("utf-8", "replace")
        return text if continuation else self.strip_lead(text)

    def strip_lead(self, text: str) -> str:
        """Remove the space that the vocabulary puts at the beginning of a whole text."""
        for _ in range(self.rules.max_lead):
            text = text.removeprefix(self.rules.lead)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token within a text; empty for an id without an entry."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_id(self, spelling: str) -> int | None:
        """The id of a vocabulary entry, given in the vocabulary's own spelling."""
        return self._backend.token_to_id(spelling) if spelling != self._guard_text else None

    def token_text(self, token_id: int) -> str:
        """A token as text; a partial character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    # ------------------------------------------------------------ single tokens

    def special_id(self, text: str) -> int | None:
        """The id of the special token spelled ``text``, or None."""
        return self._special_ids_by_text.get(text)

    @property
    def added_tokens(self) -> frozenset[str]:
        """The spellings that are always one token, whatever surrounds them."""
        return frozenset(self._added.values())

    # ------------------------------------------------------------ private

    def _named_id(self, name: str) -> int | None:
        return self._special_ids_by_text.get(self.named_tokens.get(name, ""))

    def _find_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return self.rules.piece_bytes(added, added=True)
        known = 0 <= token_id < 2**32 and token_id != self._guard_id
        token = self._backend.id_to_token(token_id) if known else None
        return b"" if token is None else self.rules.piece_bytes(token)

    def _post_process(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        if self._guard_id in ids:
            ids = [id_ for id_ in ids if id_ != self._guard_id]
        bos = self.bos_token_id
        if add_special_tokens and self._add_bos_token is not None and bos is not None:
            has_bos = bool(ids) and ids[0] == bos
            if self._add_bos_token and not has_bos:
                return [bos, *ids]
            if has_bos and not self._add_bos_token:
                return ids[1:]
        return ids


def make_backend(source: str) -> Backend:
    """The tokenizer described by a tokenizer.json. Its library may raise any exception."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(source)
    if backend.normalizer is not None and any(
        token.special and token.normalized for token in backend.get_added_tokens_decoder().values()
    ):
        # Such a token would be matched in normalised text, which can contain spellings that are not
        # in the original text and so cannot be guarded.
        data = json.loads(source)
        for token in data["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        backend = Backend.from_str(json.dumps(data))
    backend.no_padding()
    backend.no_truncation()
    return backend


def _load_backend(root: Path) -> Backend:
    path = root / "tokenizer.json"
    try:
        if not path.is_file():
            return _convert(root)
        return make_backend(path.read_text("utf-8"))
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception
        refuse_lfs_pointer(path)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelLoadError(f"{path} cannot be read: {reason}") from error


def _convert(root: Path) -> Backend:
    """Convert the tokenizer of a directory without ``tokenizer.json``, using transformers."""
    if not root.is_dir():
        raise ModelLoadError(f"there is no model directory {root}")
    if (root / tiktoken_file.NAME).is_file():
        return tiktoken_file.read_tiktoken(root)
    if (root / tekken_file.NAME).is_file():
        return tekken_file.read_tekken(root)
    if not any(root.glob("*.model")) and not (root / "vocab.json").is_file():
        raise ModelLoadError(f"{root} holds no tokenizer (tokenizer.json)")
    from transformers import AutoTokenizer  # slow to import and rarely needed

    try:
        # The default would ask on the terminal whether to run code from the directory.
        converted = AutoTokenizer.from_pretrained(
            str(root), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelLoadError(f"{root}: the tokenizer cannot be converted: {reason}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        kind = type(converted).__name__
        raise ModelLoadError(
            f"{root}: a tokenizer of kind {kind} is not supported; it needs a tokenizer.json"
        )
    return backend


def _prefix_pattern(texts: Sequence[str]) -> str:
    """A pattern for the longest match among ``texts``, as a prefix tree.

    Models have hundreds of special tokens with a common beginning, and flat alternatives would each
    be tried wherever a text has a ``<``.
    """
    branches: dict[str, list[str]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], []).append(text[1:])
    if not branches:
        return ""
    pattern = "|".join(re.escape(char) + _prefix_pattern(rest) for char, rest in branches.items())
    if "" in texts:
        return f"(?:{pattern})?"
    return pattern if len(branches) == 1 else f"(?:{pattern})"


def _decoder_state(decoder: Any) -> dict[str, Any] | None:
    return None if decoder is None else json.loads(decoder.__getstate__())


def _register_special_tokens(backend: Backend, specials: set[str]) -> dict[str, int]:
    """Make the entries among ``specials`` special tokens; returns their ids by spelling.

    A model's configuration may name tokens that are plain entries in its ``tokenizer.json``. Names
    without an entry are useless to the model and are ignored.
    """
    from tokenizers import AddedToken

    ids = {text: backend.token_to_id(text) for text in specials if text}
    found = {text: id_ for text, id_ in ids.items() if id_ is not None}
    plain = sorted(found.keys() - {t.content for t in backend.get_added_tokens_decoder().values()})
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in plain])
    return found


def _add_guard_token(backend: Backend, joint: str) -> int:
    from tokenizers import AddedToken

    backend.add_tokens([AddedToken(joint, normalized=False, special=False)])
    joint_id = backend.token_to_id(joint)
    assert joint_id is not None
    return joint_id


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) > _MAX_HELD_CHARS:
        _check_encodable(text)
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:
        _check_encodable(text)
        raise


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter("the text holds a lone surrogate, which is no character") from error
