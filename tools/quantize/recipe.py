"""The settings of a quantisation, checked before anything is read or written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import torch

from tools.quantize.gptq import GptqOptions
from tools.quantize.grid import Grid
from tools.quantize.sites import Site

Scheme = Literal["int4", "int8", "w8a8", "fp8"]
Algorithm = Literal["rtn", "gptq", "awq", "awq+gptq"]

# Group sizes that kernels support, the most common first.
GROUP_SIZES = (128, 64, 32)
PER_CHANNEL = -1  # as a group size: one scale for all inputs of an output


class QuantizeError(Exception):
    """A request that cannot be carried out; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The method of rounding.

    Attributes:
        scheme: int4 and int8 round only the weights; w8a8 and fp8 also have activations rounded,
            token by token, when the model runs.
        algorithm: rtn rounds each weight independently, gptq compensates errors, awq scales the
            important inputs first, awq+gptq does both.
        group_size: neighbouring inputs that share a scale; -1: all inputs of an output; None:
            128, 64 or 32 for int4, whichever divides all layers, and -1 for the others.
        symmetric: without zero points.
        gptq: its options.
        ignore: names of modules that are not rounded: whole names, or ``re:`` and a pattern that
            matches the start of one.
    """

    scheme: Scheme = "int4"
    algorithm: Algorithm = "gptq"
    group_size: int | None = None
    symmetric: bool = True
    gptq: GptqOptions = field(default_factory=GptqOptions)
    ignore: tuple[str, ...] = ("lm_head",)

    def __post_init__(self) -> None:
        """Reject contradictory settings."""
        size = self.group_size
        if self.scheme in ("w8a8", "fp8"):
            if size not in (None, PER_CHANNEL):
                raise QuantizeError(
                    f"{self.scheme} has one scale an output: leave --group-size out"
                )
            if not self.symmetric:
                raise QuantizeError(f"{self.scheme} has no zero points: leave --asymmetric out")
        if size is not None and size != PER_CHANNEL and size < 1:
            raise QuantizeError(f"--group-size is {size}: it must be positive, or -1")
        if not 0 < self.gptq.damping < 1:
            raise QuantizeError(f"--damping is {self.gptq.damping}: it must lie between 0 and 1")
        for pattern in self.ignore:
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise QuantizeError(f"--ignore {pattern}: {error}") from None

    @property
    def bits(self) -> int:
        """The bits of a weight."""
        return 4 if self.scheme == "int4" else 8

    @property
    def quantises_activations(self) -> bool:
        """Whether activations are rounded at run time."""
        return self.scheme in ("w8a8", "fp8")

    @property
    def uses_awq(self) -> bool:
        """Whether AWQ is part of the algorithm."""
        return self.algorithm.startswith("awq")

    @property
    def uses_gptq(self) -> bool:
        """Whether GPTQ is part of the algorithm."""
        return self.algorithm.endswith("gptq")

    def ignores(self, module: str) -> bool:
        """Whether the module of this name is left unrounded."""
        return any(
            re.match(pattern[3:], module) is not None
            if pattern.startswith("re:")
            else pattern == module
            for pattern in self.ignore
        )

    def make_grid(self, sites: list[Site], scale_dtype: torch.dtype) -> Grid:
        """The grid for these layers.

        Raises:
            QuantizeError: the group size does not divide the inputs of a layer.
        """
        return Grid(
            bits=self.bits,
            is_float=self.scheme == "fp8",
            symmetric=self.symmetric,
            group_size=self._group(sites),
            scale_dtype=scale_dtype,
        )

    def _group(self, sites: list[Site]) -> int:
        if self.group_size == PER_CHANNEL or (self.group_size is None and self.scheme != "int4"):
            return 0
        candidates = GROUP_SIZES if self.group_size is None else (self.group_size,)
        for size in candidates:
            if all(site.inputs % size == 0 for site in sites):
                return size
        size = candidates[-1]
        site = next(site for site in sites if site.inputs % size)
        fitting = [str(size) for size in GROUP_SIZES if all(s.inputs % size == 0 for s in sites)]
        hint = f"; {' or '.join(fitting)} would" if fitting else "; -1 takes all of an output's"
        raise QuantizeError(
            f"group size {size} does not divide the {site.inputs} inputs of {site.parameter}{hint}"
        )
