"""Query strings as clients write them."""

from __future__ import annotations


def without_empty_values(query: bytes) -> bytes:
    """``query`` without its parameters of the form ``name=``.

    The JavaScript SDKs of OpenAI and Anthropic write ``after=`` for ``{after: null}``, where the
    Python ones leave it out. ``metadata[name]=`` stays: a label may be empty.
    """
    if not query.endswith(b"=") and b"=&" not in query:
        return query
    return b"&".join(each for each in query.split(b"&") if not _is_empty(each))


def _is_empty(parameter: bytes) -> bool:
    name, _, value = parameter.partition(b"=")
    is_label = b"[" in name or b"%5b" in name.lower()
    return name != parameter and not value and not is_label
