"""Fields that request what this server cannot do: refused or reported, never silently dropped.

* :func:`refuse_unsupported`: features of the API that would change the answer. A request for one
  gets a 400 that names the field.
* :func:`ignored_params`: fields without effect here, known or unknown. They are named in the
  ``x-quire-ignored-params`` header, or refused under ``--strict``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from server.errors import bad_field

MAX_NAMED = 32  # ignored fields in a header or an error
_MAX_NAME_CHARS = 64
_MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024

_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "raise_exception",
        "strftime_now",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
    }
)


def _is_truthy(value: Any) -> bool:
    """Whether a value requests anything: null, false, zero and empty do not."""
    return bool(value)


def _is_set(value: Any) -> bool:
    return value is not None


def _has_other_modality(value: Any) -> bool:
    return value not in (None, [], ["text"])


class UnsupportedField(NamedTuple):
    """A field that is refused if it requests something, and why."""

    is_requested: Callable[[Any], bool]
    reason: str


_NO_AUDIO = "is not available: the models served here write text"
_NO_EMBEDDINGS = "is not available: prompts are text or token ids"

# Checked in this order.
_UNSUPPORTED: dict[str, UnsupportedField] = {
    "audio": UnsupportedField(_is_truthy, _NO_AUDIO),
    "modalities": UnsupportedField(_has_other_modality, _NO_AUDIO),
    "web_search_options": UnsupportedField(
        _is_set, "is not available: this server searches nothing"
    ),
    "moderation": UnsupportedField(_is_truthy, "is not available: nothing here judges texts"),
    "prompt_embeds": UnsupportedField(_is_set, _NO_EMBEDDINGS),
    "mm_processor_kwargs": UnsupportedField(_is_truthy, _NO_EMBEDDINGS),
    "documents": UnsupportedField(_is_truthy, "is not available: put them into the messages"),
    "logits_processors": UnsupportedField(
        _is_truthy, "is not taken: it names code to be run in the server"
    ),
    "kv_transfer_params": UnsupportedField(
        _is_truthy, "is not available: the cache belongs to one engine"
    ),
    "chat_template": UnsupportedField(
        _is_set, "is not taken from requests; the server has its own"
    ),
}

# Known to OpenAI's API, without effect here; the values that request nothing are not reported.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default"),  # of completions, whose responses have none
    "modalities": (None, [], ["text"]),
    "detokenize": (None, True),
    "spaces_between_special_tokens": (None, False),
}

# Fields of a tool that request the default: prefixes are cached and arguments streamed anyway.
_ALWAYS_ON = frozenset({"cache_control", "eager_input_streaming"})


def known_names() -> frozenset[str]:
    """Names of the refused and reported fields, for the documentation."""
    return frozenset(_UNSUPPORTED) | frozenset(_IGNORED)


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise ApiError (400) if ``body`` requests a feature that this server lacks."""
    for field, refusal in _UNSUPPORTED.items():
        if field in body and refusal.is_requested(body[field]):
            raise bad_field(field, refusal.reason)
    kwargs = body.get("chat_template_kwargs")
    if isinstance(kwargs, dict):
        for name in kwargs:
            if name in _RESERVED_TEMPLATE_KWARGS:
                raise bad_field("chat_template_kwargs", f"may not set {name!r}")
        # Templates render one after the other, so what one is given costs all requests time.
        if len(msgspec.json.encode(kwargs)) > _MAX_TEMPLATE_KWARGS_BYTES:
            limit = f"{_MAX_TEMPLATE_KWARGS_BYTES >> 10} KiB"
            raise bad_field("chat_template_kwargs", f"must be at most {limit} of JSON")


def ignored_params(extra: Mapping[str, Any] | None, prefix: str = "") -> list[str]:
    """Names of the fields in ``extra`` (a shape's unknown ones) that request something."""
    return [
        prefix + name
        for name, value in (extra or {}).items()
        if not _is_default(name, value) and value is not None
    ]


def ignored_tool_params(extra: Mapping[str, Any] | None, prefix: str) -> list[str]:
    """As above, for a tool's unknown fields: empty values and defaults request nothing."""
    return ignored_params(
        {
            name: value
            for name, value in (extra or {}).items()
            if value and name not in _ALWAYS_ON and (name, value) != ("allowed_callers", ["direct"])
        },
        prefix,
    )


def report_ignored(names: list[str], *, strict: bool) -> dict[str, str]:
    """The response header that lists ``names``; under ``strict`` a 400 instead."""
    if not names:
        return {}
    shown = [re.sub(r"[^\x21-\x7e]|,", "?", name[:_MAX_NAME_CHARS]) for name in names[:MAX_NAMED]]
    if strict:
        others = f"; nor have {', '.join(shown[1:])}" if shown[1:] else ""
        problem = f"has no effect here, and the server is strict{others}"
        raise bad_field(names[0][:_MAX_NAME_CHARS], problem)
    return {"x-quire-ignored-params": ",".join(shown)}


def _is_default(name: str, value: Any) -> bool:
    return (name in _IGNORED and value in _IGNORED[name]) or (name in _UNSUPPORTED and not value)
