"""Compiles without a GPU what the benches compile on one, so that a lent GPU need not.

    python -m tests.pretended_gpu.ahead FOLDER [--models qwen3-0.6b,llama-3.1-8b] [--kernels WORD]
        [--quantization int4]

Runs the engine and the cases of ``kernels.bench`` on the pretended device, at full size. Instead of
running a kernel, a launch compiles it for sm_90 into FOLDER, a cache of Triton's; large tensors are
neither filled nor computed with. A GPU machine with the same Python and Triton finds everything
there if FOLDER is brought to the same path and ``TRITON_CACHE_DIR`` names it. It needs only the
files that end in ``cubin``, ``json`` and ``so``.

Until Triton 3.6 a program that passes a kernel's arguments to the driver is compiled for each
signature, and is here too. It is linked with a library of the driver, for which a stand-in is made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver

from engine.config import Quantization
from kernels.bench.suite import full_suite
from kernels.bench.variants import applied, trials_of
from kernels.triton import launch as launcher
from tests.kernels.triton_kernels.aot import Target
from tests.pretended_gpu.launches import Launches
from tests.pretended_gpu.stand_in import pretended_gpu
from tests.pretended_gpu.tensor import DeviceTensor, PretendedGpu

HAS_LAUNCHERS = hasattr(driver, "make_launcher")
_DRIVER_FUNCTIONS = (
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain"),
    *("cuFuncSetAttribute", "cuGetErrorString", "cuPointerGetAttribute"),
)
_READY = "QUIRE_AHEAD"  # set once the process can load the stand-in
_LARGEST = 1_000_000
_H200 = {"num_multiprocessors": 132, "total_bytes": 140 * 10**9}
_PROMPTS = (8192, 2048, 5)


class _Argument:
    """A tensor as far as the compiler looks at it."""

    def __init__(self, tensor: DeviceTensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self._offset = tensor.inner.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        """Its address within memory that is aligned."""
        return self._offset

    def ptr_range(self) -> int:
        """Nothing is known about it."""
        return 0


class Compiled(Launches):
    """Compiles what would be launched."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__(gpu)
        self.num_failed = 0

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Compile a launch that has not been seen."""
        if not all(grid):
            return
        values = [_Argument(each) if isinstance(each, DeviceTensor) else each for each in args]
        try:
            # As on a GPU of compute capability 9.0 (``kernels/triton/launch.py``).
            made = kernel.warmup(*values, grid=grid, launch_pdl=True, **meta)
            if HAS_LAUNCHERS:
                driver.CudaLauncher(made.src, made.metadata)
        # A kernel that is too large, for instance: the GPU would refuse it as well.
        except Exception as error:
            self.num_failed += 1
            print(f"{kernel.__name__}: {error}", file=sys.stderr)


@contextmanager
def _compiling() -> Iterator[Compiled]:
    with pretended_gpu(largest=_LARGEST, make_launches=Compiled, **_H200) as (gpu, launches):
        assert isinstance(launches, Compiled)
        yield launches
        for stream in gpu.queues.streams:
            stream.drop()


def _compile_engine(model: str, quantization: Quantization | None) -> int:
    """Compile a model's steps, and return how many kernels failed."""
    from tools.bench import shapes
    from tools.bench.session import Session, load_core, parser

    shapes.CONFIGS[model]["num_hidden_layers"] = 2  # all of them are alike
    arguments = ["--model", model, "--device", "cuda", "--attention-backend", "triton"]
    options = parser(None, model).parse_args(arguments)
    with _compiling() as launches:
        for invariant in (False, True) if quantization is None else (False,):
            longest = max(_PROMPTS) + 64
            given = {"max_model_len": longest, "cache_bytes": 6 * 2**30}
            core = load_core(options, batch_invariant=invariant, quantization=quantization, **given)
            session = Session(core)
            for length in _PROMPTS:
                session.submit([7] * length, 1)
                # Nothing was computed, so its logits are not numbers.
                with contextlib.suppress(RuntimeError):
                    session.finish()
            session.prepare()
        return launches.num_failed


def _compile_kernels(word: str) -> int:
    """Compile the benches' cases with a word in their names, and their variants."""
    num_failed = 0
    for make in (case for case in full_suite() if word in case.args[0]):
        with _compiling() as launches:
            make(torch.device("cuda"), torch.bfloat16).run()
            num_failed += launches.num_failed
        for trial in trials_of(make):
            for variant in trial.variants:
                # Failures are no fault: a variant may be too large.
                with _compiling(), applied(trial, variant):
                    make(torch.device("cuda"), torch.bfloat16).run()
    return num_failed


def _run_with_driver(folder: Path) -> int:
    """Run this program again where a stand-in for the driver's library is found."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "driver.c")
        source.write_text(
            "".join(f"int {name}(void) {{ return 0; }}\n" for name in _DRIVER_FUNCTIONS)
        )
        library = Path(directory, "libcuda.so.1")
        soname = f"-Wl,-soname,{library.name}"
        subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", library, source], check=True)
        environment = {
            **os.environ,
            _READY: "1",
            "LD_LIBRARY_PATH": directory,
            "TRITON_LIBCUDA_PATH": directory,
            "TRITON_CACHE_DIR": str(folder),
        }
        command = [sys.executable, "-m", "tests.pretended_gpu.ahead", *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Return the number of kernels that could not be compiled, at most 100."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="qwen3-0.6b,llama-3.1-8b", help="empty for none")
    parser.add_argument(
        "--kernels", default="", metavar="WORD", help="cases with it in their names"
    )
    parser.add_argument("--quantization", help="of the models; default: none")
    options = parser.parse_args(argv)
    if _READY not in os.environ:
        return _run_with_driver(options.folder.resolve())
    assert not launcher.INTERPRETED, "compile without TRITON_INTERPRET"
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(Target())
    models = filter(None, options.models.split(","))
    num_failed = sum(_compile_engine(model, options.quantization) for model in models)
    num_failed += _compile_kernels(options.kernels)
    num_kernels = len(list(options.folder.glob("*/*.cubin")))
    print(f"{num_kernels} kernels in {options.folder}, {num_failed} failed")
    return min(num_failed, 100)


if __name__ == "__main__":
    sys.exit(main())
