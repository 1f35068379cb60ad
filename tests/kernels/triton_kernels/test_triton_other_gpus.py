"""What GPUs other than Hopper would run, read from the compiled kernels, without one.

No kernel takes more shared memory than a GPU has, which ``aot.py`` sees to as a GPU would. Nor does
one find that out by compiling with fewer and fewer stages, for which a start would wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.triton_kernels.compiler import compiler

pytest.importorskip("triton")

# Those that a step consists of, with the widest heads, latents, states and quantised weights.
_HOT = (
    *("decode-llama-8b", "decode-few-gemma2-9b", "decode-few-gemma4-31b-full"),
    *("prefill-llama-8b", "prefill-gemma3-4b-images", "prefill-gemma4-31b-full"),
    *("latents-deepseek-v2-lite", "delta-kimi-linear", "recurrent-qwen3-next-granite-4"),
    *("awq-8-llama-8b", "awq-64-llama-8b", "fp8-8-llama-8b", "moe-decode-qwen3-30b"),
    *("skinny-1-gate-up-qwen3-0.6b", "adapters-32-llama-8b", "plain-sampling-128k"),
    *("matmul-40-llama-8b", "matmul-20-down-qwen3-0.6b", "matmul-8192-llama-8b"),
    *("invariant-decode-gemma4-31b-full", "invariant-prefill-gemma4-31b-full"),
)


def check(capability: int, names: tuple[str, ...], tmp_path: Path) -> None:
    with compiler(tmp_path, "--for", str(capability)) as compiled:
        reports = compiled(tmp_path, *names)
    assert {report["case"] for report in reports} == set(names)
    for report in reports:
        assert report["num_tries"] == 1, report
        assert report["tma"] == report["wgmma"] == 0, "only Hopper has these"
    assert any(report["cp_async"] > 0 for report in reports)


def test_float8_and_long_products_compile_for_a_gpu_without_float8(tmp_path: Path) -> None:
    check(86, ("decode-llama-8b-fp8", "matmul-40-down-qwen3-0.6b"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_the_kernels_of_a_step_fit(capability: int, tmp_path: Path) -> None:
    codes = ("decode-llama-8b-fp8", "prefill-llama-8b-fp8", "invariant-decode-llama-8b-fp8")
    check(capability, _HOT + codes, tmp_path)
