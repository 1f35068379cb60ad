"""Formats of quantised checkpoints: from ``quantization_config`` to how each matrix is stored."""

from engine.quantization.formats.registry import FORMATS, read_format

__all__ = ["FORMATS", "read_format"]
