"""Parameters that a checkpoint may lack, though its config does not say so.

Hugging Face's code gives them neutral values then. StableLM 2 12B was published without the biases
of its norms, A.X-K1 without those that correct the routing; what that code has saved has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.models.safetensors import Header
from engine.models.spec import DecoderSpec, OptionalPart
from engine.models.tables import tables_of

# The end of the parameters' names.
_ENDS: dict[OptionalPart, str] = {
    "norm_biases": "norm.bias",
    "router_corrections": "router.correction",
}


def with_present(spec: DecoderSpec, headers: Iterable[Header]) -> DecoderSpec:
    """Return the spec without the optional parameters that the files lack altogether."""
    if not spec.optional:
        return spec
    tables = tables_of(spec)
    names = (tables.full_name(name) for header in headers for name in header.entries)
    found = {tables.targets[name].parameter for name in names if name in tables.targets}
    for part in spec.optional:
        if not any(parameter.endswith(_ENDS[part]) for parameter in found):
            spec = _without(spec, part)
    return spec


def _without(spec: DecoderSpec, part: OptionalPart) -> DecoderSpec:
    if part == "router_corrections":
        assert spec.moe is not None
        return replace(spec, moe=replace(spec.moe, has_correction_bias=False))
    return replace(spec, norm=replace(spec.norm, bias=False))
