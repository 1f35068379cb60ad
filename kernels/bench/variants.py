"""Time kernels with other tiles, warps and stages than those they choose.

    python -m kernels.bench.variants [--only WORD]

Prints a line of JSON for each variant of each case, the first of them as it is. A variant that does
not compile, or is wrong, says so. Compile them ahead (``tests/pretended_gpu/ahead.py``) where time
on a GPU is short.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from kernels.bench.case import Ceilings
from kernels.bench.suite import MakeCase, full_suite
from kernels.triton import decode, matmul, prefill, quantised, skinny


@dataclass(frozen=True)
class Variant:
    """Other settings for one kernel.

    Args:
        meta: arguments of the launch, such as ``num_stages``.
        constants: of the module.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = {**self.meta, **self.constants}
        return ", ".join(f"{name} {value}" for name, value in settings.items()) or "as it is"


@dataclass(frozen=True)
class Trial:
    """Variants of the kernel of some cases."""

    cases: str  # what their names begin with
    module: ModuleType
    kernel: str
    variants: tuple[Variant, ...]


AS_IT_IS = Variant()
_NARROW, _WIDE = (
    tuple(quantised.TileShape(rows, columns, columns // 16) for rows in (16, 32, 64, 128))
    for columns in (64, 128)
)
# Of few rows: fewer outputs, other stages, fewer splits of the inputs, and by groups of warps.
_FEW = (
    *(
        Variant(constants={"_TILES": (quantised.TileShape(16, *tile), *quantised._TILES[1:])})
        for tile in ((64, 4), (128, 8))
    ),
    *(Variant({"num_stages": stages}) for stages in (4, 6, 8)),
    *(Variant(constants={"_TARGET_WARPS": warps}) for warps in (512, 1056)),
    *(Variant(constants={"_TILES": tiles, "_MOST_UNTURNED_ROWS": 0}) for tiles in (_NARROW, _WIDE)),
)
TRIALS = (
    Trial(
        "decode",
        decode,
        "_share_kernel",
        (
            AS_IT_IS,
            *(
                Variant({"num_stages": stages, "num_warps": warps})
                for stages, warps in ((5, 4), (3, 4), (5, 8))
            ),
        ),
    ),
    Trial(
        "prefill",
        prefill,
        "_prefill_kernel",
        (
            AS_IT_IS,
            *(Variant({"num_stages": stages}) for stages in (2, 4)),
            *(Variant({"num_stages": stages}, {"COPIES_TILES": False}) for stages in (3, 2)),
        ),
    ),
    Trial(
        "invariant product",
        matmul,
        "_matmul_kernel",
        (
            AS_IT_IS,
            *(
                Variant(constants={"_WIDE": matmul._Tile(rows, columns, swath, 8, stages)})
                for rows, columns, swath, stages in ((128, 256, 8, 3), (256, 128, 16, 3))
            ),
        ),
    ),
    *(
        Trial(
            f"{codes} product",
            quantised,
            "_packed_kernel",
            (
                AS_IT_IS,
                *(Variant(constants={"_TILES": tiles}) for tiles in (_NARROW, _WIDE)),
                *_FEW,
            ),
        )
        for codes in ("int4", "int4 in groups of 128", "fp8")
    ),
    Trial("experts gpt-oss-20b mxfp4 64", quantised, "_packed_kernel", (AS_IT_IS, *_FEW)),
    *(
        Trial(
            part,
            skinny,
            "_skinny_kernel",
            (
                AS_IT_IS,
                *(
                    Variant({"num_warps": warps}, {"_TILE": tile})
                    for tile in (8192, 16384)
                    for warps in (4, 8)
                ),
            ),
        )
        for part in ("qkv", "output", "gate up", "down")
    ),
)


@contextmanager
def applied(trial: Trial, variant: Variant) -> Iterator[None]:
    """Launch the trial's kernel with a variant's settings."""
    module, launch = trial.module, trial.module.launch
    before = {name: getattr(module, name) for name in variant.constants}

    def launch_variant(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        more = variant.meta if kernel.__name__ == trial.kernel else {}
        launch(kernel, grid, *args, **{**meta, **more})

    vars(module).update(variant.constants, launch=launch_variant)
    try:
        yield
    finally:
        vars(module).update(before, launch=launch)


def outcome(
    make: MakeCase, device: torch.device, dtype: torch.dtype, ceilings: Ceilings | None
) -> dict[str, Any]:
    """Return a case's error, and its time if there are ceilings to compare it with."""
    case = make(device, dtype)
    error = case.error()
    result: dict[str, Any] = {"error": error, "is_right": error <= case.tolerance}
    if ceilings is not None:
        from kernels.bench.measure import median_s

        time_s = median_s(case.run)
        floor_s = case.floor_s(ceilings.bytes_per_s, ceilings.flops_per_s)
        result |= {"time_us": time_s * 1e6, "share_of_floor": floor_s / time_s}
    return result


def trials_of(make: MakeCase) -> Iterator[Trial]:
    """Return the trials of a case."""
    return (trial for trial in TRIALS if make.args[0].startswith(trial.cases))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.variants", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: kernels.bench measures on a GPU", file=sys.stderr)
        return 2
    from kernels.bench.measure import measure_ceilings

    device = torch.device("cuda")
    ceilings = measure_ceilings(device)
    num_failed = 0
    for make in (case for case in full_suite() if options.only in case.args[0]):
        for trial in trials_of(make):
            for variant in trial.variants:
                row: dict[str, Any] = {"case": make.args[0], "variant": str(variant)}
                try:
                    with applied(trial, variant), torch.inference_mode():
                        row |= outcome(make, device, torch.bfloat16, ceilings)
                # A variant may be too large for the device, or for the compiler.
                except Exception as error:
                    row["failed"] = (str(error).strip() or type(error).__name__).splitlines()[0]
                    num_failed += 1
                print(json.dumps(row), flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(device), "failed": num_failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
