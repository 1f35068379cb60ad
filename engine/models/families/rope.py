"""The ``rope_*`` keys of a config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from engine.models.config_reader import ConfigReader
from engine.models.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MropeSpec,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)


def read_rope(
    reader: ConfigReader,
    *,
    theta: float,
    trained: int,
    head_dim: int,
    partial: float = 1.0,
    interleaved: bool = False,
    extra_keys: tuple[str, ...] = (),
    mrope: MropeSpec | None = None,
) -> RopeSpec:
    """Read a model's rotary embedding, in either spelling.

    These are ``rope_parameters`` (transformers 5), and ``rope_theta`` with ``rope_scaling``.

    Args:
        reader: the model's config.
        theta: the family's default base.
        trained: ``max_position_embeddings``.
        head_dim: of the heads.
        partial: the family's default fraction of a head that is rotated.
        interleaved: whether adjacent dimensions are rotated against each other.
        extra_keys: keys of the section unrelated to frequencies; other readers use them.
        mrope: the family's default sections; None: positions have one dimension.
    """
    partial = reader.number("partial_rotary_factor", partial)
    theta = reader.number("rope_theta", theta, above=1.0)
    original = reader.count("original_max_position_embeddings", trained)
    older, newer = reader.section("rope_scaling"), reader.section("rope_parameters")
    section = older or newer  # as transformers 5 has it: someone added the older one by hand
    if section is None:
        num_dims = _num_dims(reader, partial, head_dim)
        return _with_mrope(reader, RopeSpec(theta, None, num_dims, interleaved), mrope, head_dim)
    for key in extra_keys:
        section.ignore(key)
    if mrope is not None:
        mrope = _read_mrope(section, mrope)
    rope = _read_section(
        section, theta, trained, original, head_dim, partial=partial, interleaved=interleaved
    )
    return _with_mrope(section, rope, mrope, head_dim)


def _read_mrope(section: ConfigReader, family: MropeSpec) -> MropeSpec:
    for key in ("mrope_interleaved", "interleaved"):  # fixed for each family
        section.ignore(key)
    sizes = section.list_of_length("mrope_section", 3)
    if sizes is None:
        return family
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise section.error("mrope_section", "must be a list of three numbers of frequencies")
    return dataclasses.replace(family, sections=tuple(sizes))


def _with_mrope(
    section: ConfigReader, rope: RopeSpec, planes: MropeSpec | None, head_dim: int
) -> RopeSpec:
    """Add the planes to ``rope``. Raises ModelLoadError if they do not fit the head."""
    if planes is None:
        return rope
    num_frequencies = (rope.num_dims or head_dim) // 2
    if not planes.interleaved and sum(planes.sections) != num_frequencies:
        problem = f"must add up to the {num_frequencies} frequencies of a head"
        raise section.error("mrope_section", problem)
    return dataclasses.replace(rope, mrope=planes)


def read_ropes_by_layer(
    reader: ConfigReader,
    *,
    theta: float,
    local_theta: float,
    trained: int,
    head_dim: int,
    partial: float = 1.0,
    default: RopeSpec | None = None,
) -> tuple[RopeSpec, RopeSpec]:
    """Read the ropes of full attention and of windowed layers.

    They are in ``rope_parameters`` by layer type (transformers 5), or in ``rope_local_base_freq``
    and the older keys (Gemma 3), which scale only the full layers' rope. ``default`` is the full
    layers' rope if the config has no such section, in families that never had the older keys;
    ``partial`` is the family's default fraction of a head that is rotated.
    """
    local_theta = reader.number("rope_local_base_freq", local_theta, above=1.0)
    both = reader.section("rope_parameters")
    if both is None and default is not None:
        return default, RopeSpec(local_theta)
    if both is None or "rope_type" in both:  # older exports: the full layers' only
        full = read_rope(reader, theta=theta, trained=trained, head_dim=head_dim, partial=partial)
        return full, RopeSpec(local_theta, None, full.num_dims)
    found = []
    for name, base in (("full_attention", theta), ("sliding_attention", local_theta)):
        section = both.section(name)
        if section is None:
            found.append(RopeSpec(base, None, _num_dims(reader, partial, head_dim)))
        else:
            found.append(_read_section(section, base, trained, trained, head_dim, partial=partial))
    both.finish()
    return found[0], found[1]


def _read_section(
    section: ConfigReader,
    theta: float,
    trained: int,
    original: int,
    head_dim: int,
    *,
    partial: float = 1.0,
    interleaved: bool = False,
) -> RopeSpec:
    theta = section.number("rope_theta", theta, above=1.0)
    partial = section.number("partial_rotary_factor", partial)
    num_dims = _num_dims(section, partial, head_dim)
    kind = section.text("type", "default")
    kind = section.text("rope_type", kind)
    if kind in ("default", "mrope"):  # the latter only in readers of text parts
        section.finish()
        return RopeSpec(theta, None, num_dims, interleaved)
    if kind == "proportional":
        section.require("factor", 1.0)
        section.finish()
        return RopeSpec(theta, ProportionalScaling(partial))
    read = SCALINGS.get(kind)
    if read is None:
        known = ", ".join(("default", "proportional", *sorted(SCALINGS)))
        raise section.error("rope_type", f"is {kind[:80]!r}; known: {known}")
    scaling = read(section, trained, original)
    section.finish()
    if isinstance(scaling, LongRopeScaling):
        num_pairs = (num_dims or head_dim) // 2
        for name in ("short_factor", "long_factor"):
            if len(getattr(scaling, name)) != num_pairs:
                raise section.error(name, f"must have {num_pairs} entries")
    return RopeSpec(theta, scaling, num_dims, interleaved)


def _num_dims(reader: ConfigReader, partial: float, head_dim: int) -> int | None:
    num_dims = int(partial * head_dim)
    if partial > 1.0 or num_dims < 2 or num_dims % 2:
        raise reader.error(
            "partial_rotary_factor", f"must leave an even part of {head_dim} dimensions"
        )
    return None if num_dims == head_dim else num_dims


def _factor(section: ConfigReader, default: float | None = None) -> float:
    """Read the factor by which the context is stretched."""
    factor = section.number("factor", default)
    if factor < 1.0:
        raise section.error("factor", f"must be at least 1, not {factor:g}")
    return factor


def _linear(section: ConfigReader, trained: int, original: int) -> LinearScaling:
    return LinearScaling(_factor(section))


def _dynamic(section: ConfigReader, trained: int, original: int) -> DynamicScaling:
    return DynamicScaling(_factor(section))


def _llama3(section: ConfigReader, trained: int, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=_factor(section),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position_embeddings=section.count(
            "original_max_position_embeddings", original
        ),
    )
    if scaling.high_freq_factor < scaling.low_freq_factor:
        raise section.error("high_freq_factor", "must not be below low_freq_factor")
    return scaling


def _yarn(section: ConfigReader, trained: int, original: int) -> YarnScaling:
    original = section.count("original_max_position_embeddings", original)
    factor = _factor(section, trained / original)
    mscale = section.non_negative_number("mscale", 0.0)  # 0: as if it were absent
    mscale_all_dim = section.non_negative_number("mscale_all_dim", 0.0)
    attention_factor = _yarn_mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=section.number("attention_factor", attention_factor),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Return the attention temperature of YaRN's equation 22: ``0.1 m ln(factor) + 1``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(section: ConfigReader, trained: int, original: int) -> LongRopeScaling:
    original = section.count("original_max_position_embeddings", original)
    if original == 1:
        raise section.error("original_max_position_embeddings", "must be above 1")
    factor = _factor(section, trained / original)
    scale = 1.0
    if factor > 1.0:
        scale = math.sqrt(1.0 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=section.numbers("short_factor"),
        long_factor=section.numbers("long_factor"),
        original_max_position_embeddings=original,
        attention_factor=section.number("attention_factor", scale),
    )


SCALINGS: dict[str, Callable[[ConfigReader, int, int], RopeScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # longrope's former name
}
