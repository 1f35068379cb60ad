"""What a Hopper GPU would run, read from the compiled kernels, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton_kernels.compiler import CompileCases, compiler

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]

_PIPELINED = (
    *("_prefill_kernel", "_share_kernel", "_grouped_matmul_kernel", "_matmul_kernel"),
    *("_turned_matmul_kernel", "_shrink_kernel"),
    *("_latent_prefill_kernel", "_latent_split_kernel"),
    *("_runs_of_tile_kernel", "_run_kernel"),
    *("_packed_kernel", "_grouped_packed_kernel"),
    *("_delta_chunks_kernel", "_channel_delta_chunks_kernel", "_scan_chunks_kernel"),
)


@pytest.fixture(scope="module")
def compile_cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompileCases]:
    """Returns the reports of the launches of the named cases, or of all; see ``aot.py``."""
    with compiler(tmp_path_factory.mktemp("compiler")) as compiled:
        yield compiled


_OF_PROMPTS = (
    *("_prefill_kernel", "_latent_prefill_kernel", "_runs_of_tile_kernel"),
    *("_prepare_kernel", "_delta_chunks_kernel", "_scan_chunks_kernel"),
    *("_prepare_channels_kernel", "_channel_delta_chunks_kernel"),
)
_OF_ADAPTERS = ("_shrink_kernel", "_expand_kernel")
# Registers needed before a loop and after it may be spilled meanwhile.
_MOST_STACK_BYTES = 64
# 256 state values per channel need more registers than exist: slower, but not wrong.
_SPILLS = ("state-space-bamba",)
# A few registers are reloaded in each block, so that two programs share a multiprocessor.
_RELOADS = {"q4_k-64-llama-8b": 5, "recurrent-qwen3-next-granite-4": 4}
# So that two programs share a multiprocessor; a loop has some 400 instructions.
_OF_TWO_PROMPTS = {"stack_bytes": 96, "reloads_in_loops": 27}
_MOST_SHARED_BYTES = 227 * 1024  # per program


def _is_coded(report: dict[str, Any]) -> bool:
    return report["case"].endswith(("int8", "fp8"))


def check(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["shared_bytes"] <= _MOST_SHARED_BYTES, report
        is_skinny = report["kernel"] in ("_skinny_kernel", "_skinny_packed_kernel")
        # Which experts are chosen is not known in advance; the router's weights are.
        is_chosen = report["case"].startswith("few-experts") and report["before_turn"] == []
        if is_skinny and not is_chosen:
            # Sixteen bytes per thread of each output's weights.
            assert set(report["before_turn"]) == {"ld.global.v4.b32"}, report
            if report["case"].startswith("skinny-1-"):
                assert 12 * 32 * report["registers"] <= 65536, report  # twelve warps
        elif report["kernel"] == "_share_kernel":
            # The plan's numbers, and keys and values.
            before = set(report["before_turn"])
            assert "ld.global.b32" in before, report
            assert all(each.startswith("ld.") for each in before), report
        elif report["kernel"] in _OF_ADAPTERS:
            assert set(report["before_turn"]) == {"ld.global.b32"}, report  # the plan's numbers
        else:
            assert report["before_turn"] == [], report
        # These only have to run: their products use other units, operands on the stack, or three
        # times as many parts.
        if report["case"].endswith(("float32", "float16")):
            continue
        is_of_two = report["kernel"] == "_prefill_kernel" and report["registers"] == 128
        # Only spilled registers use the stack here.
        if is_of_two:
            assert all(report[kind] <= most for kind, most in _OF_TWO_PROMPTS.items()), report
        elif report["case"] not in _SPILLS:
            assert report["stack_bytes"] <= _MOST_STACK_BYTES, report
            assert report["reloads_in_loops"] <= _RELOADS.get(report["case"], 0), report
        # No register is written while a product reads from it.
        assert report["operands_rewritten"] == 0, report
        # The products of a tile are in flight together, if the assembler can prove independence and
        # has registers (prefill.py).
        is_serial = is_of_two and not report["tma"]
        assert is_serial or 2 * report["product_waits"] <= report["products"], report
        if report["tma"]:
            # What is spilled between loops is not needed in them (prefill_tiles.py).
            assert report["reloads_in_loops"] == 0, report
        if report["kernel"] in _OF_PROMPTS:
            assert report["wgmma"] > 0, report
        is_wide = "m64n256k16" in report["wgmma_shapes"]
        if report["kernel"] == "_prefill_kernel" and not is_wide and not _is_coded(report):
            # Two programs share a multiprocessor (prefill.py).
            assert 2 * 32 * report["num_warps"] * report["registers"] <= 65536, report
            assert 2 * (report["shared_bytes"] + 1024) <= 228 * 1024, report
        if report["kernel"] == "_latent_split_kernel":
            assert report["mma"] > 0, report
            # Two programs share a multiprocessor (latent.py).
            assert 2 * 32 * report["num_warps"] * report["registers"] <= 65536, report
            assert 2 * (report["shared_bytes"] + 1024) <= 228 * 1024, report
        if report["kernel"] == "_share_kernel":
            assert report["mma"] > 0, report
            # Two share a multiprocessor (decode.py), or some would begin when others have ended.
            assert 2 * 32 * report["num_warps"] * report["registers"] <= 65536, report
            assert 2 * (report["shared_bytes"] + 1024) <= 228 * 1024, report
        if report["kernel"] == "_run_kernel" and report["num_warps"] == 4:
            # Two programs share a multiprocessor (invariant_attention.py).
            assert 2 * 32 * report["num_warps"] * report["registers"] <= 65536, report
            assert 2 * (report["shared_bytes"] + 1024) <= 228 * 1024, report
        if report["kernel"].endswith("matmul_kernel") and "matmul-" in report["case"]:
            # The depth does not depend on the number of rows, so the bits do not either
            # (matmul.py).
            rows = int(report["case"].split("-")[1])
            widths = (16, 32, 64, 128, 256)
            columns = next(each for each in widths if rows <= each or each == 256)
            assert report["wgmma_shapes"] == [f"m64n{columns}k16"], report
            assert report["loads_in_loops"] == 0, report
        if re.match("(?!nf4).*-64-", report["case"]) and report["kernel"] == "_packed_kernel":
            # Two share a multiprocessor (quantised.py).
            assert 2 * 32 * report["num_warps"] * report["registers"] <= 65536, report
            assert 2 * (report["shared_bytes"] + 1024) <= 228 * 1024, report
        if report["kernel"] in _PIPELINED:
            assert report["cp_async"] > 0, report


def test_attention_compiles_for_hopper(tmp_path: Path, compile_cases: CompileCases) -> None:
    reports = compile_cases(tmp_path, "decode-few-llama-8b")
    assert "_share_kernel" in {report["kernel"] for report in reports}
    check(reports)


def test_bounds_keep_what_is_no_number(tmp_path: Path, compile_cases: CompileCases) -> None:
    """A request that has come to it must fail. A GPU's minimum and maximum are the other number,
    unless they say so; the interpreter's never are."""
    reports = compile_cases(tmp_path, "gates-laguna-step-3.7")
    assert len(reports) == 4
    for report in reports:
        ptx = (tmp_path / f"{report['case']}.{report['kernel']}.ptx").read_text()
        assert re.search(r"\b(min|max)\.NaN\.f32", ptx), report
        assert not re.search(r"\b(min|max)\.f32", ptx), report


@pytest.mark.slow
def test_products_of_copied_tiles_are_in_flight_together(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    names = [f"prefill-{name}" for name in ("llama-8b", "mistral-7b-window", "qwen2-0.5b")]
    reports = [each for each in compile_cases(tmp_path, *names) if each["tma"]]
    assert {report["case"] for report in reports} == set(names)
    check(reports)


@pytest.mark.slow
def test_prompts_tiles_share_a_multiprocessor(tmp_path: Path, compile_cases: CompileCases) -> None:
    """With small blocks, small heads and windows, copied by TMA or not."""
    models = ("llama-8b", "qwen2-0.5b", "mistral-7b-window")
    names = ["prefill-qwen3-0.6b"]
    names += [f"prefill-{name}{by}" for name in models for by in ("", "-pointers")]
    reports = compile_cases(tmp_path, *names)
    assert {report["case"] for report in reports} == set(names)
    check(reports)


@pytest.mark.slow
def test_the_widest_heads_compile_for_hopper(tmp_path: Path, compile_cases: CompileCases) -> None:
    """512, where a tile of queries and one of keys just fit into shared memory."""
    check(compile_cases(tmp_path, "decode-gemma4-31b-full", "prefill-gemma4-31b-full"))


@pytest.mark.slow
def test_sampling_compiles_for_hopper(tmp_path: Path, compile_cases: CompileCases) -> None:
    reports = {r["kernel"]: r for r in compile_cases(tmp_path, "plain-sampling-128k")}
    assert reports.keys() == {"_adjust_kernel", "_choose_kernel"}
    check(list(reports.values()))
    # Six programs share a multiprocessor, and hide what each waits for.
    adjust = reports["_adjust_kernel"]
    assert 6 * 32 * adjust["num_warps"] * adjust["registers"] <= 65536, adjust


@pytest.mark.slow
def test_batch_invariant_attention_is_of_the_same_products(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    """A query's products have one shape alone and in a chunk, hence the same bits
    (invariant_attention.py)."""
    for name in ("llama-8b", "gemma2-9b"):
        reports = compile_cases(tmp_path, *(f"invariant-{k}-{name}" for k in ("decode", "prefill")))
        check(reports)
        shapes = {
            report["kernel"]: report["wgmma_shapes"] for report in reports if report["products"]
        }
        assert shapes.keys() == {"_run_kernel", "_runs_of_tile_kernel"}
        assert shapes["_run_kernel"] == shapes["_runs_of_tile_kernel"]


@pytest.mark.slow
def test_products_of_few_rows_and_of_many_are_of_one_depth(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    reports = compile_cases(tmp_path, *(f"matmul-{rows}-llama-8b" for rows in (1, 40, 8192)))
    assert [report["num_warps"] for report in reports] == [4, 4, 8]
    check(reports)


@pytest.mark.slow
def test_products_of_few_rows_read_weights_before_their_turn(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    names = [f"skinny-{rows}-gate-up-qwen3-0.6b" for rows in (1, 4)]
    names += [f"skinny-{form}-1-gate-up-llama-8b" for form in ("awq", "fp8")]
    reports = compile_cases(tmp_path, *names)
    assert [report["case"] for report in reports] == names
    check(reports)


@pytest.mark.slow
def test_codes_are_widened_in_the_registers_that_are_multiplied(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    """Nothing but a zero for each output passes through shared memory."""
    names = [f"{form}-{rows}-llama-8b" for form in ("awq", "fp8") for rows in (8, 64)]
    reports = compile_cases(tmp_path, *names, "gptq-split-llama-8b", "awq-8192-llama-8b")
    check(reports)
    for report in reports:
        if report["kernel"] == "_packed_kernel":
            layouts = (tmp_path / f"{report['case']}.{report['kernel']}.ttgir").read_text()
            loop = layouts.partition("scf.for")[2].partition("scf.yield")[0]
            assert "local_alloc" not in loop, report
            if report["wgmma"]:
                assert report["products"] == 8, report
                assert report["product_waits"] == 2, report
            else:  # few rows: nothing waits for a product
                assert report["mma"] > 0, report
                moved = re.findall(r"convert_layout.*: tensor<(\w+),.*->", loop)
                assert all(re.fullmatch(r"\d+x[a-z]\w+", shape) for shape in moved), moved
        elif report["kernel"] == "_widen_kernel":
            ptx = (tmp_path / f"{report['case']}.{report['kernel']}.ptx").read_text()
            assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}, report
    of_few = [report["case"] for report in reports if not report["wgmma"]]
    assert {"awq-8-llama-8b", "fp8-8-llama-8b"} <= set(of_few)


@pytest.mark.slow
def test_products_of_few_outputs_fit_in_a_multiprocessor(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    """They stage as much as there is room for."""
    names = [f"{form}-8-few-outputs" for form in ("gptq", "nf4", "fp8", "q4_k", "q6_k")]
    reports = compile_cases(tmp_path, *names)
    assert {report["case"] for report in reports} == set(names)
    check(reports)


@pytest.mark.slow
def test_few_rows_of_all_heads_compile(tmp_path: Path, compile_cases: CompileCases) -> None:
    """A tile of keys and values that is read ahead, in registers."""
    models = ("qwen3-0.6b", "gemma2-9b", "gemma4-31b-full", "llama-8b-int8", "tiny-heads")
    names = [f"decode-few-{name}" for name in models] + ["decode-llama-8b"]
    reports = compile_cases(tmp_path, *names)
    assert {report["case"] for report in reports} == set(names)
    check(reports)


@pytest.mark.slow
def test_adapters_products_compile_for_hopper(tmp_path: Path, compile_cases: CompileCases) -> None:
    """For few tokens, whose inputs are cut into groups, and for many."""
    names = [f"adapters-{rows}-llama-8b" for rows in (1, 32, 512, 8192)]
    reports = compile_cases(tmp_path, *names, "adapters-32-llama-8b-down")
    check(reports)
    for report in reports:
        # Both kernels and both heights of tiles multiply the same way, so that a token has the same
        # bits in any batch (lora.py).
        if report["kernel"] in _OF_ADAPTERS:
            assert report["wgmma"] > 0, report


@pytest.mark.slow
def test_heads_smaller_than_a_product_compile(tmp_path: Path, compile_cases: CompileCases) -> None:
    """The interpreter runs what a GPU rejects."""
    names = ("decode-tiny-heads", "prefill-tiny-heads")
    reports = compile_cases(tmp_path, *names)
    assert {report["case"] for report in reports} == set(names)
    check(reports)


@pytest.mark.slow
def test_codes_of_a_cache_are_rounded_as_the_references(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    """No product is fused with the sum that rounds it, and quotients are exact."""
    report, *_ = compile_cases(tmp_path, "cache-writes-llama-8b-int8")
    ptx = (tmp_path / f"{report['case']}.{report['kernel']}.ptx").read_text()
    assert "mul.rn.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "fma.rn" not in ptx


@pytest.mark.slow
def test_layers_with_a_state_compile_for_hopper(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    reports = compile_cases(tmp_path, "recurrent-qwen3-next-granite-4")
    assert {report["kernel"] for report in reports} >= {
        *("_gated_delta_kernel", "_selective_scan_kernel", "_conv_kernel", "_keep_kernel"),
        *("_prepare_kernel", "_delta_chunks_kernel", "_scan_chunks_kernel"),
    }
    check(reports)


@pytest.mark.slow
def test_layers_with_decays_by_channel_compile_for_hopper(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    names = ("delta-kimi-linear", "delta-by-channel-uneven", "channels-falcon-mamba-7b")
    reports = compile_cases(tmp_path, *names)
    check(reports)
    by_kernel = {report["kernel"]: report for report in reports}
    assert by_kernel.keys() == {
        *("_gated_delta_kernel", "_prepare_channels_kernel", "_channel_delta_chunks_kernel"),
        *("_channel_scan_kernel", "_sum_channels_kernel", "_begin_channels_kernel"),
        "_walk_channels_kernel",
    }
    prepare = by_kernel["_prepare_channels_kernel"]
    # Two programs share a multiprocessor.
    assert 2 * (prepare["shared_bytes"] + 1024) <= 228 * 1024, prepare
    for name in ("_sum_channels_kernel", "_walk_channels_kernel"):
        # Six warps for each scheduler hide what each token waits for.
        assert 24 * 32 * by_kernel[name]["registers"] <= 65536, by_kernel[name]
    assert by_kernel["_begin_channels_kernel"]["cp_async"] > 0


@pytest.mark.slow
def test_codes_are_copied_ahead_and_widened_in_registers(
    tmp_path: Path, compile_cases: CompileCases
) -> None:
    """Sixteen bytes per thread of codes, and four activations; experts in MXFP4."""
    reports = compile_cases(tmp_path, "moe-mxfp4-1-gpt-oss-20b")
    check(reports)
    kernel, others = "_grouped_packed_kernel", {"_sort_kernel", "_sum_kernel"}
    assert {r["kernel"] for r in reports} == {kernel, "_clamped_swiglu_kernel", *others}
    for ptx in tmp_path.glob(f"*.{kernel}.ptx"):
        sizes = re.findall(r"cp\.async\.c[ag].* (0x[0-9a-f]+)", ptx.read_text())
        assert set(sizes) == {"0x10", "0x8"}, sizes


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path, compile_cases: CompileCases) -> None:
    reports = compile_cases(tmp_path)
    modules = (ROOT / "kernels" / "triton").glob("*.py")
    launched = {line for file in modules for line in file.read_text().split() if "_kernel(" in line}
    defined = {name.split("(")[0] for name in launched if name.startswith("_")}
    assert defined == {report["kernel"] for report in reports}
    check(reports)
    many = [
        report
        for report in reports
        if report["case"].startswith("moe-prefill") or "-8192-" in report["case"]
        if report["kernel"]
        in ("_grouped_matmul_kernel", "_packed_kernel", "_grouped_packed_kernel")
    ]
    assert all(report["wgmma"] > 0 for report in many)
