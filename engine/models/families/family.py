"""What the table of families holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec


class Family(NamedTuple):
    """How a Hugging Face model_type is read."""

    read: Callable[[ConfigReader], DecoderSpec]
    models: str
    differences: str  # from Llama
    has_remote_code: bool = False  # published configs name remote code, now in Hugging Face
