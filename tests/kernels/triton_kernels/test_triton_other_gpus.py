"""What GPUs other than Hopper would run, read from the compiled kernels, without one.

No kernel takes more shared or tensor memory than a GPU has, which ``aot.py`` sees to as a GPU
would. Nor does one find that out by compiling with fewer and fewer stages, for which a start would
wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.triton_kernels.compiler import compiler

pytest.importorskip("triton")

# The most that is in shared memory at once: wide heads, latents, states and long products.
_LARGE = (
    *("decode-llama-8b", "decode-few-gemma2-9b", "decode-few-gemma4-31b-full"),
    *("prefill-llama-8b", "prefill-gemma3-4b-images", "prefill-gemma4-31b-full"),
    *("latents-deepseek-v2-lite", "delta-kimi-linear", "recurrent-qwen3-next-granite-4"),
    *("matmul-40-llama-8b", "matmul-20-down-qwen3-0.6b"),
    *("invariant-decode-gemma4-31b-full", "invariant-prefill-gemma4-31b-full"),
    *("decode-llama-8b-fp8", "prefill-llama-8b-fp8", "invariant-decode-llama-8b-fp8"),
)

# A kernel of each kind, with what a generation may lack: float8, instructions, tensor memory.
_KINDS = (
    *("decode-llama-8b-fp8", "prefill-llama-8b-fp8", "cache-writes-llama-8b-fp8"),
    *("latents-deepseek-v3", "prefill-gemma2-9b", "plain-sampling-128k", "judging-128k"),
    *("matmul-100-llama-8b", "gptq-64-llama-8b", "mxfp4-8-llama-8b", "fp8-8-llama-8b"),
    *("moe-decode-qwen3-30b", "few-experts-1-qwen3-30b", "adapters-32-llama-8b"),
    *("channels-falcon-mamba-7b", "gates-laguna-step-3.7", "int8-rows-llama-8b"),
)


def check(capability: int, names: tuple[str, ...], tmp_path: Path) -> None:
    with compiler(tmp_path, "--for", str(capability)) as compiled:
        reports = compiled(tmp_path, *names)
    assert {report["case"] for report in reports} == set(names)
    for report in reports:
        assert report["num_tries"] == 1, report
        assert report["tma"] == report["wgmma"] == 0, "only Hopper has these"
    assert any(report["cp_async"] > 0 for report in reports)


@pytest.mark.slow
def test_float8_and_long_products_compile_for_a_gpu_without_float8(tmp_path: Path) -> None:
    check(86, ("decode-llama-8b-fp8", "matmul-40-down-qwen3-0.6b"), tmp_path)


@pytest.mark.slow
def test_adapters_of_long_prompts_compile_for_a_b200(tmp_path: Path) -> None:
    check(100, ("adapters-8192-llama-8b",), tmp_path)


@pytest.mark.slow
def test_the_largest_kernels_fit_a_consumers_gpu(tmp_path: Path) -> None:
    check(86, _LARGE, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_each_kind_compiles_for_other_generations(capability: int, tmp_path: Path) -> None:
    check(capability, _KINDS, tmp_path)


@pytest.mark.slow
def test_states_fit_the_tensor_memory_of_a_b200(tmp_path: Path) -> None:
    """Of all dtypes: the compiler keeps a part of it for each product of a loop."""
    names = ("delta-kimi-linear", "delta-kimi-linear-float16", "delta-kimi-linear-float32")
    check(100, names, tmp_path)
