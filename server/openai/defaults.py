"""The sampling defaults that a model ships with, for fields that a request leaves out.

Models ship a ``generation_config.json`` with the temperature and truncation they were tuned for,
and GGUF files have keys of the same meaning.
An explicit ``"do_sample": false`` means greedy decoding.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from engine.errors import InvalidParameter
from engine.gguf.file import find_gguf, read_gguf
from engine.text.tokenizer_files import read_json
from engine.types import SamplingParams
from server.errors import shorten

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_log = logging.getLogger(__name__)


def read_sampling_defaults(model_dir: str) -> dict[str, Any]:
    """Values of ``SamplingParams`` fields; empty if the model defines none that are usable.

    Raises:
        ModelLoadError: the file exists and cannot be read.
    """
    path = find_gguf(model_dir)
    if path is not None:
        from engine.gguf.tokenizer import sampling_defaults  # few models are GGUF files

        config = sampling_defaults(read_gguf(path))
    else:
        path = Path(model_dir) / "generation_config.json"
        config = read_json(path) if path.is_file() else {}
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    try:
        defaults = {name: _read_number(name, value) for name, value in defaults.items()}
        SamplingParams(**defaults)
    except InvalidParameter as error:
        _log.warning("the sampling defaults in %s are not used: %s", path.name, error.message)
        return {}
    return defaults


def _read_number(name: str, value: Any) -> Any:
    """A field's value. Raises InvalidParameter if it is of another type."""
    if name == "top_k":
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise InvalidParameter(f"'{name}' must be an integer, not {_show(value)}", param=name)
    elif type(value) not in (int, float):
        raise InvalidParameter(f"'{name}' must be a number, not {_show(value)}", param=name)
    return value


def _show(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False), 40)
