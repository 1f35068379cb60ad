"""Translation of grammars from GBNF, llama.cpp's notation, to Lark's."""

from __future__ import annotations

from server.errors import bad_field, shorten

_MAX_CHARS = 65_536  # bounds the translator's work, which is per character


def to_lark(text: str, param: str) -> str:
    """Translate a grammar into the notation that is compiled.

    Raises:
        ApiError: 400, ``param`` is too long or malformed.
    """
    if len(text) > _MAX_CHARS:
        raise bad_field(param, f"has {len(text)} characters; at most {_MAX_CHARS} are taken")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise bad_field(param, "is nested too deeply") from None
    except Exception as error:  # its own kinds, and whatever malformed input makes it raise
        raise bad_field(param, f"is not a grammar: {shorten(str(error))}") from None
