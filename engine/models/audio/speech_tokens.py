"""Read the special tokens of Whisper from the files beside its config.

generation_config.json has most of them. What it lacks is found among the tokenizer's added tokens,
or in config.json, where older exports write it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.audio.speech import SpeechTokens
from engine.audio.types import AudioRules
from engine.errors import ModelLoadError
from engine.models.json_file import parse_object, read_bytes
from engine.models.spec import DecoderSpec

_TOKENIZER, _GENERATION = "tokenizer.json", "generation_config.json"


def with_speech_tokens(
    rules: AudioRules, config: dict[str, Any], directory: Path, text: DecoderSpec
) -> AudioRules:
    """Return the rules of a model that only transcribes, with its special tokens.

    Raises:
        ModelLoadError: a token that transcriptions need is in none of the files, or a value is no
            token; one line that names it.
    """
    tokens = _read(_Files(config, directory, text.vocab_size), text)
    transcription = msgspec.structs.replace(rules.transcription, speech=tokens)
    return msgspec.structs.replace(rules, transcription=transcription)


class _Files:
    """What the files say.

    Args:
        config: the parsed config.json.
        directory: the model's.
        vocab_size: of the model; other tokens are refused.
    """

    def __init__(self, config: dict[str, Any], directory: Path, vocab_size: int) -> None:
        self._config = config
        self._size = vocab_size
        self._where = directory / _GENERATION
        self._generation = _object(self._where)
        self._added = _added_tokens(directory)

    def value(self, key: str) -> Any:
        """Return what a key has in generation_config.json, or else in config.json."""
        found = self._generation.get(key)
        return self._config.get(key) if found is None else found

    def token(self, key: str, spelling: str = "") -> int | None:
        """Return a token by its key, or else by its spelling; None: there is none."""
        found = self.value(key)
        return self._added.get(spelling) if found is None else self._checked(key, found)

    def needed(self, key: str, spelling: str) -> int:
        """Return a token that there must be."""
        found = self.token(key, spelling)
        if found is None:
            raise ModelLoadError(f"{self._where}: has no '{key}', nor the tokenizer {spelling!r}")
        return found

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return a list of tokens; empty if there is none."""
        found = self.value(key) or []
        if not isinstance(found, list):
            raise ModelLoadError(f"{self._where}: '{key}' is no list of tokens")
        return tuple(self._checked(key, each) for each in found)

    def named(self, key: str) -> dict[str, int]:
        """Return an object's tokens by name; empty if there is none."""
        found = self.value(key) or {}
        if not isinstance(found, dict):
            raise ModelLoadError(f"{self._where}: '{key}' is no object of tokens")
        return {name: self._checked(key, each) for name, each in found.items()}

    def _checked(self, key: str, token: Any) -> int:
        if type(token) is not int or not 0 <= token < self._size:
            raise ModelLoadError(f"{self._where}: '{key}' has {token!r:.40}, which is no token")
        return token


def _read(files: _Files, text: DecoderSpec) -> SpeechTokens:
    languages, tasks = files.named("lang_to_id"), files.named("task_to_id")
    first = files.value("max_initial_timestamp_index")
    if first is not None and (type(first) is not int or first < 0):
        raise ModelLoadError(f"{_GENERATION}: 'max_initial_timestamp_index' is no number of steps")
    if not text.eos_token_ids:
        raise ModelLoadError(f"{_GENERATION}: has no 'eos_token_id'")
    no_timestamps = files.needed("no_timestamps_token_id", "<|notimestamps|>")
    if no_timestamps + 1 >= text.vocab_size:
        raise ModelLoadError(f"{_GENERATION}: no timestamps follow 'no_timestamps_token_id'")
    return SpeechTokens(
        start=files.needed("decoder_start_token_id", "<|startoftranscript|>"),
        no_timestamps=no_timestamps,
        text_end=text.eos_token_ids[0],
        previous=files.token("prev_sot_token_id", "<|startofprev|>"),
        languages=tuple((name.strip("<|>"), token) for name, token in languages.items()),
        transcribe=tasks.get("transcribe"),
        translate=tasks.get("translate") if languages else None,
        suppressed=files.tokens("suppress_tokens"),
        begin_suppressed=files.tokens("begin_suppress_tokens"),
        max_initial=first,
        max_text=text.num_learned_positions,
    )


def _added_tokens(directory: Path) -> dict[str, int]:
    """Return the tokenizer's special tokens by spelling."""
    added = _object(directory / _TOKENIZER).get("added_tokens")
    if not isinstance(added, list):
        return {}
    return {
        each["content"]: each["id"]
        for each in added
        if isinstance(each, dict)
        and isinstance(each.get("content"), str)
        and type(each.get("id")) is int
    }


def _object(path: Path) -> dict[str, Any]:
    return parse_object(path, read_bytes(path)) if path.is_file() else {}
