"""How linear layers are held: as loaded, or quantised to int8 or int4 while they load."""

from engine.quantization.selection import choose_method, packed_unsupported_reason

__all__ = ["choose_method", "packed_unsupported_reason"]
