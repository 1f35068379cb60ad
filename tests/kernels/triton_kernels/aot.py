"""Compiles the launches of the kernels' wrappers for a GPU, without one.

    python -m tests.kernels.triton_kernels.aot [--for CAPABILITY] [OUT_FOLDER [CASE ...]]

The GPU's compute capability is 90 (of an H100 or H200) unless it is told. Each case calls a wrapper
with ``meta`` tensors in the shapes of a real model. The launch is replaced by Triton's
ahead-of-time compilation of the same arguments, so that the result is what a GPU would run: the
same specialisation, tile sizes, warps and stages. Prints a JSON line for each kernel: its
registers, stack bytes (where spilled registers go), shared memory, the matrix instructions in its
PTX, and for an H100 the instructions in loops of its machine code. The PTX itself goes to the
folder. Without a folder it reads lines of JSON, ``["OUT_FOLDER", ["CASE", ...]]``, and prints an
empty line after the reports of each.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from kernels.triton import launch as launcher
from kernels.triton.known_launches import launch_fitting

HOPPER = 90
# Of a multiprocessor, in KB (CUDA C++ Programming Guide, "Compute Capabilities"): of an A100; of
# consumers' GPUs of three generations and their kin (A10, L4); of an H100 or H200; of a B200.
_SHARED_KB = {80: 164, 86: 100, 89: 100, HOPPER: 228, 100: 228, 120: 100}
_TENSOR_COLUMNS = 512  # of tensor memory, of a B200
_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Target:
    """The minimum of a driver for compiling: it reports the target and has no device."""

    def __init__(self, capability: int = HOPPER) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiling:
    """Stands in for a kernel: a launch is compiled, and refused as by a GPU if it is too large.

    Args:
        kernel: what to compile.
        capability: of the GPU.
    """

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel = kernel
        self.__name__: str = kernel.__name__
        self._most_bytes = (_SHARED_KB[capability] - 1) << 10
        self.num_tries = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **meta: Any) -> Any:
            self.num_tries += 1
            compiled = self._kernel.warmup(*args, grid=grid, **meta)
            if compiled.metadata.shared > self._most_bytes:
                raise OutOfResources(compiled.metadata.shared, self._most_bytes, "shared memory")
            columns = compiled.metadata.tmem_size or 0
            if columns > _TENSOR_COLUMNS:
                raise OutOfResources(columns, _TENSOR_COLUMNS, "tensor memory")
            return compiled

        return launch


def record(case: Callable[[], object], name: str, capability: int = HOPPER) -> list[dict[str, Any]]:
    """Run a case and compile its launches."""
    reports = []

    def compile_instead(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        compiling = Compiling(kernel, capability)
        compiled = launch_fitting(compiling, grid, args, meta)
        tries = {"num_tries": compiling.num_tries}
        described = _describe(compiled, has_loops=capability == HOPPER)
        reports.append({"case": name, "kernel": kernel.__name__, **tries, **described})

    for module in launching_modules():
        module.launch = compile_instead
    _pretend(capability)
    case()
    return reports


def _pretend(capability: int) -> None:
    """Let kernels choose their tiles for this GPU."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.triton"):
            for asked, told in (
                ("shared_memory_bytes", _SHARED_KB[capability] << 10),
                ("has_group_products", capability // 10 == HOPPER // 10),
                ("has_tensor_memory", capability // 10 == 10),
                ("converts_float8", capability >= 89),
            ):
                if hasattr(module, asked):
                    setattr(module, asked, lambda _, found=told: found)


def launching_modules() -> list[Any]:
    """The modules that launch kernels."""
    modules = [m for n, m in sys.modules.items() if n.startswith("kernels.triton.")]
    return [module for module in modules if callable(getattr(module, "launch", None))]


def _describe(compiled: Any, *, has_loops: bool) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = _instructions(file.name) if has_loops else []
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared_bytes": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
        "wgmma": ptx.count("wgmma.mma_async"),
        "wgmma_shapes": sorted(set(re.findall(r"wgmma\.mma_async\S*?\.(m\d+n\d+k\d+)", ptx))),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "cp_async": ptx.count("cp.async."),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "products": sum("HGMMA" in text for _, text in code),
        # Those that leave none in flight.
        "product_waits": sum(bool(re.search(r"WARPGROUP\.DEPBAR.*, 0x0\b", t)) for _, t in code),
        # What an outer loop reloads, once for many turns of the inner one, costs little.
        "reloads_in_loops": sum(
            "LDL" in text for body in _loops(code, innermost=True) for text in body
        ),
        # Asynchronous copies do not count.
        "loads_in_loops": _in_loops(code, "LDG."),
        "operands_rewritten": _operands_rewritten(ptx),
        "before_turn": _before_turn(ptx),
        "ptx": ptx,
        "ttgir": compiled.asm["ttgir"],
    }


def _before_turn(ptx: str) -> list[str] | None:
    """The global memory accesses of a kernel before it awaits its turn; None without a wait."""
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    pattern = r"\b((?:ld|st|atom|red|cp\.async)\b\S*global\S*)"
    return re.findall(pattern, before) if waits else None


def _instructions(cubin: str) -> list[tuple[int, str]]:
    """The address and text of each instruction."""
    sass = subprocess.run(
        [_TOOL, "-sass", cubin], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.+?);", sass)
    return [(int(address, 16), text) for address, text in found]


def _in_loops(code: list[tuple[int, str]], name: str) -> int:
    """The number of instructions of this name in loops, once per enclosing backward jump."""
    return sum(name in text for body in _loops(code) for text in body)


def _operands_rewritten(ptx: str) -> int:
    """Instructions in innermost loops that write registers from which products in flight read.

    ptxas relies on there being none (PTX ISA, wgmma.mma_async). Accumulators it watches itself.
    """
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: place for place, line in enumerate(lines) if line[:1] == "$"}
    jumps = [
        (labels[target[1]], place)
        for place, line in enumerate(lines)
        if (target := re.search(r"\bbra\S*\s+(\$\w+)", line)) and labels[target[1]] < place
    ]
    found = set()
    for begin, end in jumps:
        if any(begin < other and last < end for other, last in jumps):
            continue
        flying: list[set[str]] = [set()]  # registers by group of products; the last is not started
        for place in (*range(begin, end), *range(begin, end)):
            text = lines[place].strip()
            if "wgmma.mma_async" in text:
                for each in re.findall(r"\{(.*?)\}", text)[1:]:
                    flying[-1].update(re.findall(r"%r\d+", each))
            elif "wgmma.commit_group" in text:
                flying.append(set())
            elif waits := re.search(r"wgmma\.wait_group\.sync\.aligned (\d+)", text):
                flying = flying[-1 - int(waits[1]) :]
            elif not text.startswith(("//", ".")):
                written = re.match(r"(?:@\S+\s+)?\S+\s+(\{.*?\}|[^,;]*)", text)
                if written and set().union(*flying) & set(re.findall(r"%r\d+", written[1])):
                    found.add(place)
    return len(found)


def _loops(code: list[tuple[int, str]], *, innermost: bool = False) -> list[list[str]]:
    """The bodies of backward jumps, or of those around no other."""
    jumps = [
        (int(target[1], 16), address)
        for address, text in code
        if (target := re.search(r"\bBRA.* (0x[0-9a-f]+)", text))
    ]
    loops = [(begin, end) for begin, end in jumps if begin < end]
    if innermost:
        loops = [
            loop
            for loop in loops
            if not any(
                loop != other and loop[0] <= other[0] and other[1] <= loop[1] for other in loops
            )
        ]
    return [[text for address, text in code if begin <= address < end] for begin, end in loops]


def main() -> None:
    assert not launcher.INTERPRETED, "compile without TRITON_INTERPRET"
    parser = argparse.ArgumentParser()
    parser.add_argument("--for", type=int, default=HOPPER, choices=_SHARED_KB, dest="capability")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    triton.runtime.driver.set_active(Target(options.capability))
    from tests.kernels.triton_kernels.aot_cases import CASES

    if options.folder is not None:
        names = options.cases or CASES
        compile_into(options.folder, names, CASES, options.capability)
        return
    for line in sys.stdin:
        folder, names = json.loads(line)
        compile_into(Path(folder), names or CASES, CASES, options.capability)
        print(flush=True)


def compile_into(
    folder: Path,
    names: Iterable[str],
    cases: Mapping[str, Callable[[], object]],
    capability: int = HOPPER,
) -> None:
    """Print the reports of these cases, and write what was compiled to the folder."""
    for name in names:
        for report in record(cases[name], name, capability):
            for stage in ("ttgir", "ptx"):
                file = folder / f"{name}.{report['kernel']}.{stage}"
                file.write_text(report.pop(stage))
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
