"""Read a config.json key by key, and find the keys that no reader has used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from engine.errors import ModelLoadError
from engine.models.unused_keys import unused_keys

logger = logging.getLogger(__name__)

# Keys that do not affect inference, or that are read elsewhere.
_EXPORTED = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures
    attention_dropout bos_token_id chunk_size_feed_forward embd_pdrop finetuning_task
    hidden_dropout id2label initializer_range is_llama_config keys_to_ignore_at_inference
    label2id max_sequence_length model_type output_attentions output_hidden_states pad_token_id
    pretraining_tp problem_type resid_pdrop return_dict sep_token_id task_specific_params
    tokenizer_class torchscript transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_bfloat16 use_cache
"""
# Defaults of Hugging Face's generate(), which older exports write among the model's own keys.
_GENERATION = """
    bad_words_ids begin_suppress_tokens cache_implementation decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature tf_legacy_loss top_k top_p typical_p
"""
_HARMLESS = frozenset((_EXPORTED + _GENERATION).split())
# Keys of whole models that a decoder lacks; they appear when one config is nested in another.
_FOREIGN = """
    add_cross_attention cross_attention_hidden_size is_decoder is_encoder_decoder pruned_heads
    tie_encoder_decoder
"""
_ABSENT = frozenset(_FOREIGN.split())
# Keys of models whose own code lets tokens attend to both sides, which the implementation that
# shares their model_type does not read.
_BIDIRECTIONAL = frozenset(("bidirectional", "is_bidirectional", "use_bidirectional_attention"))

_MAX_COUNT = 2**31
_MAX_NUMBER = 1e12


class ConfigReader:
    """Typed access to a config. Reads are recorded; ``finish`` reports the keys never read.

    Null counts as absent everywhere, as Hugging Face writes it for "not set".
    """

    def __init__(self, config: dict[str, Any], where: str = "config.json") -> None:
        self._config = {key: value for key, value in config.items() if value is not None}
        self._unread = set(self._config)
        self._nulls = config.keys() - self._config.keys()
        self._where = where

    def __contains__(self, key: str) -> bool:
        return key in self._config

    @property
    def names(self) -> tuple[str, ...]:
        """All keys that are present."""
        return tuple(self._config)

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Set the values of absent keys; an explicit null stays absent.

        This is for configs that were saved without the values that equal their class's defaults.
        """
        absent = defaults.keys() - self._config.keys() - self._nulls
        self._config |= {key: defaults[key] for key in absent}

    def count(self, key: str, default: int | None = None, limit: int = _MAX_COUNT) -> int:
        """Return a positive integer below ``limit``. Raises ModelLoadError for anything else."""
        value = self._take(key, default)
        if type(value) is not int or not 0 < value < limit:
            raise self.error(key, f"must be a positive integer below {limit}, not {value!r:.80}")
        return value

    def non_negative(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 0. Raises ModelLoadError for anything else."""
        value = self._take(key, default)
        if type(value) is not int or not 0 <= value < _MAX_COUNT:
            raise self.error(key, f"must be a whole number, not {value!r:.80}")
        return value

    def integer(self, key: str, default: int) -> int:
        """Return an integer of either sign."""
        value = self._take(key, default)
        if type(value) is not int or abs(value) >= _MAX_COUNT:
            raise self.error(key, f"must be an integer, not {value!r:.80}")
        return value

    def optional_count(self, key: str) -> int | None:
        """Return a positive integer, or None if the key is absent."""
        return self.count(key) if key in self else None

    def value(self, key: str) -> Any:
        """Return what a present key has, for another one that it is an alias of."""
        return self._take(key, None)

    def has_value(self, key: str, value: Any) -> bool:
        """Return whether the key is present with this value."""
        return self._take(key, None) == value

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """Return a number above ``above`` and below 1e12, which all real ones are."""
        value = self._take(key, default)
        if type(value) not in (int, float) or not above < value < _MAX_NUMBER:
            raise self.error(key, f"must be a number above {above:g}, not {value!r:.80}")
        return float(value)

    def non_negative_number(self, key: str, default: float | None = None) -> float:
        """Return a number of at least 0 and below 1e12."""
        value = self._take(key, default)
        return 0.0 if type(value) in (int, float) and value == 0 else self.number(key, default)

    def optional_number(self, key: str) -> float | None:
        """Return a positive number, or None if the key is absent."""
        return self.number(key) if key in self else None

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""
        value = self._take(key, None)
        if not isinstance(value, list) or not all(
            type(entry) in (int, float) and 0 < entry < _MAX_NUMBER for entry in value
        ):
            raise self.error(key, "must be a list of positive numbers")
        return tuple(float(entry) for entry in value)

    def int_pair(self, key: str) -> tuple[int, int]:
        """Return two positive integers: rows and columns."""
        value = self._take(key, None)
        if not isinstance(value, list) or [type(n) for n in value] != [int, int] or min(value) < 1:
            raise self.error(key, f"must be two positive integers, not {value!r:.80}")
        return value[0], value[1]

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._take(key, default)
        if type(value) is not bool:
            raise self.error(key, f"must be true or false, not {value!r:.80}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r:.80}")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; empty if absent."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(key, "must be a list of strings")
        return value

    def entries(self, key: str) -> list[Any]:
        """Return a list as it is; empty if absent."""
        value = self._take(key, [])
        if not isinstance(value, list):
            raise self.error(key, "must be a list")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object as it is; empty if absent."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return value

    def flag_or_number(self, key: str, default: bool = False) -> bool:
        """Return a boolean, which some exports write as a number."""
        value = self._take(key, default)
        if type(value) not in (bool, int):
            raise self.error(key, f"must be true or false, not {value!r:.80}")
        return bool(value)

    def list_of_length(self, key: str, length: int) -> list[Any] | None:
        """Return a list with at least one entry per layer, cut to these, or None if absent or
        empty."""
        value = self._take(key, [])
        if value == []:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise self.error(key, f"must be a list of at least {length} entries")
        return value[:length]

    def is_list(self, key: str) -> bool:
        """Return whether the key is present with a list."""
        return isinstance(self._config.get(key), list)

    def indices(self, key: str) -> frozenset[int]:
        """Return a set of layer numbers; empty if absent."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(type(entry) is int for entry in value):
            raise self.error(key, "must be a list of layers")
        return frozenset(value)

    def layers(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return a list of layer numbers in its order."""
        value = self._take(key, list(default))
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise self.error(key, "must be a list of layers")
        return tuple(value)

    def section(self, key: str) -> ConfigReader | None:
        """Return a nested object, which needs a ``finish`` of its own, or None if absent."""
        value = self._take(key, ())
        if value == ():
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return ConfigReader(value, f"{self._where}, '{key}'")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return a token id or a list of them as a tuple; empty if absent."""
        value = self._take(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise self.error(key, "must be a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def require(self, key: str, value: Any) -> None:
        """Require that the key, if present, has the one supported value."""
        given = self._take(key, value)
        if given != value:
            raise self.error(key, f"is {given!r:.80}; only {value!r} is supported")

    def ignore(self, key: str) -> None:
        """Mark a key as read that does not affect inference in this family, whatever its value."""
        self._unread.discard(key)

    def drop(self, key: str) -> None:
        """Treat a key as absent, which has another meaning in this family than in others."""
        self._unread.discard(key)
        self._config.pop(key, None)

    def refuse(self, key: str, why: str) -> None:
        """Require that the key is absent, null, false or empty."""
        if self._take(key, None):
            raise self.error(key, why)

    def finish(self) -> None:
        """Raise ModelLoadError naming the keys that were never read.

        Those that Hugging Face's implementation does not read either are logged.
        """
        absent = {key for key in _ABSENT | _BIDIRECTIONAL if not self._config.get(key)}
        unknown = self._unread - _HARMLESS - absent
        unused = unused_keys(str(self._config.get("model_type", "")), unknown - _BIDIRECTIONAL)
        if unused:
            message = "%s: not used by Hugging Face's implementation, and ignored: %s"
            logger.info(message, self._where, _names(unused))
        if unknown - unused:
            raise ModelLoadError(f"{self._where}: unsupported keys: {_names(unknown - unused)}")

    def error(self, key: str, problem: str) -> ModelLoadError:
        """Make the one-line error about a key."""
        return ModelLoadError(f"{self._where}: '{key}' {problem}")

    def _take(self, key: str, default: Any) -> Any:
        self._unread.discard(key)
        return self._config.get(key, default)


def _names(keys: set[str]) -> str:
    return ", ".join(f"{key[:80]!r}" for key in sorted(keys)[:8])
