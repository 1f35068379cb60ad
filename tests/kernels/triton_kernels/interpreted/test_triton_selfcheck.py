"""The self-check of kernels: right ones pass, and each wrong one is named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.paths import default_model_dir
from engine.runner import load
from kernels import select
from kernels.attention import AttentionSpec, SelectionSpec
from kernels.operations import Kernels
from kernels.scaled import scaled_linear
from kernels.select import NoKernelsError, select_kernels
from kernels.triton import (
    backend,
    check_products,
    decode,
    invariant_decode,
    invariant_prefill,
    operations,
    plan,
    prefill,
    selfcheck,
)
from kernels.triton.backend import TritonAttention
from kernels.triton.check_products import (
    check_experts,
    check_packed,
    check_packed_bits,
    check_scaled,
    check_skinny,
    check_swapped,
)
from kernels.triton.matmul import invariant_linear
from kernels.triton.moe import fused_moe
from kernels.triton.quantised import packed_linear
from kernels.triton.selfcheck import check_batch_invariance, self_check
from kernels.triton.skinny import skinny_linear
from kernels.triton.skinny_packed import skinny_packed_linear
from tests.kernels.row_scales import cpu_takes_row_scales

SPEC = AttentionSpec(4, 2, 32, 16, torch.float32, torch.device("cpu"))
STATES = replace(SPEC, has_recurrent_layers=True)
EXPERTS = replace(SPEC, has_experts=True)
SPARSE = AttentionSpec(
    *(4, 1, 24, 16, torch.float16, SPEC.device),
    value_dim=16,
    selection=SelectionSpec(top_k=40, num_heads=6, head_dim=16),
)
LATENT = replace(SPEC, num_kv_heads=1, head_dim=24, value_dim=16)


def with_operations(**changed: Any) -> Kernels:
    kept = {name: getattr(operations, name) for name in operations.__all__}
    return Kernels(TritonAttention(), SimpleNamespace(**{**kept, **changed}))


@pytest.mark.parametrize(
    ("spec", "invariant"),
    [
        (SPEC, True),
        (AttentionSpec(6, 2, 32, 64, torch.float16, SPEC.device, (None, 100), 30.0, True), False),
        (AttentionSpec(2, 2, 16, 8, torch.bfloat16, SPEC.device, (50,)), False),
        (replace(SPEC, windows=(None, 20), is_bidirectional=True), False),
        (LATENT, False),
        (SPARSE, False),
        pytest.param(STATES, False, marks=pytest.mark.slow),
        pytest.param(EXPERTS, False, marks=pytest.mark.slow),
        pytest.param(replace(STATES, dtype=torch.bfloat16), False, marks=pytest.mark.slow),
        (replace(SPEC, cache_dtype=torch.int8), False),
        (replace(SPEC, cache_dtype=torch.float8_e4m3fn, dtype=torch.float16), False),
    ],
)
def test_right_kernels_pass(spec: AttentionSpec, invariant: bool) -> None:
    assert self_check(Kernels(TritonAttention(invariant=invariant), operations), spec) is None


@pytest.mark.parametrize("padding", [7.0, float("nan")])
def test_padding_of_states_may_be_anything_finite(
    padding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "_CHECKS", {"states": selfcheck._states})
    monkeypatch.setattr(selfcheck, "_STATE_STEPS", ((1, 1, 1, 1),))
    ordinary = Kernels(TritonAttention(), operations)
    assert self_check(ordinary, STATES) is None

    def left(*given: Any) -> torch.Tensor:
        made = operations.gated_delta(*given)
        made[-1] = padding
        return made

    told = self_check(with_operations(gated_delta=left), STATES)
    assert (told is None) == (padding == 7.0)


@pytest.mark.slow
def test_products_of_codes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_packed(torch.float16, SPEC.device) is None
    products = {
        "packed_linear": packed_linear,
        "skinny_packed_linear": skinny_packed_linear,
        "fused_moe": fused_moe,
    }
    for name, right in products.items():
        with monkeypatch.context() as changed:
            changed.setattr(check_products, name, lambda *given, right=right: 2 * right(*given))
            assert "products of codes is wrong" in (check_packed(torch.float16, SPEC.device) or "")


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_products_of_rounded_rows_are_checked(
    monkeypatch: pytest.MonkeyPatch, codes: torch.dtype
) -> None:
    if codes == torch.float8_e4m3fn and not cpu_takes_row_scales():
        pytest.skip("this torch has float8 products with row scales on GPUs only")
    assert check_scaled(codes, torch.bfloat16, SPEC.device) is None
    monkeypatch.setattr(check_products, "scaled_linear", lambda *given: 2 * scaled_linear(*given))
    reason = check_scaled(codes, torch.bfloat16, SPEC.device) or ""
    assert "products in float8 is wrong" in reason or "products in int8 is wrong" in reason


def test_products_of_few_rows_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_skinny(torch.float16, SPEC.device) is None

    def unadded(*given: Any, stream: Any = None, **more: Any) -> torch.Tensor:
        return skinny_linear(*given, stream=None if stream is None else stream.clone(), **more)

    def unnormed(*given: Any, norm: Any = None, **more: Any) -> torch.Tensor:
        return skinny_linear(*given, **more)

    for wrong in (unadded, unnormed):
        monkeypatch.setattr(check_products, "skinny_linear", wrong)
        told = check_skinny(torch.float16, SPEC.device) or ""
        assert "products of few rows is wrong" in told


@pytest.mark.usefixtures("matrix_units")
def test_bits_of_products_of_few_rows_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_swapped(torch.bfloat16, SPEC.device) is None

    def another_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        whole = invariant_linear(x, weight)
        if x.shape[0] > 1:
            return whole
        half = x.shape[1] // 2
        parts = (x[:, :half] @ weight[:, :half].T, x[:, half:] @ weight[:, half:].T)
        return parts[0] + parts[1]

    monkeypatch.setattr(check_products, "invariant_linear", another_order)
    assert "products of few rows is wrong" in (check_swapped(torch.bfloat16, SPEC.device) or "")


@pytest.mark.slow
@pytest.mark.usefixtures("matrix_units")
def test_bits_of_experts_and_of_codes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in (check_experts, check_packed_bits):
        assert check(torch.float16, SPEC.device) is None
        assert "no matrix units" in (check(torch.float32, SPEC.device) or "")

    def in_another_order(x: torch.Tensor, *given: Any) -> torch.Tensor:
        return fused_moe(x, *given) if x.shape[0] > 100 else fused_moe(x / 3, *given) * 3

    monkeypatch.setattr(check_products, "invariant_moe", in_another_order)
    for check in (check_experts, check_packed_bits):
        assert "is wrong on this device" in (check(torch.float16, SPEC.device) or "")


_RETURN_NOTHING = (
    *("add_experts", "copy_blocks", "feed_back", "latent_rope_store"),
    *("index_rope_store", "select_slots"),
)
# Kernels that verify drafts are not checked at start, sizes are not results, and what adapters plan
# is part of their products, which plan for themselves where nothing has.
_UNCHECKED = {
    *("accept_drafts", "distribution", "sample_from_probs", "moe_token_thresholds"),
    *("plan_adapters", "verify_drafts"),
}
_OWN = {
    n for n in operations.__all__ if getattr(operations, n).__module__.startswith("kernels.tri")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_OWN - _UNCHECKED))
def test_a_wrong_operation_is_refused(name: str) -> None:
    def wrong(*arguments: Any) -> Any:
        if name in _RETURN_NOTHING:
            return None
        result = getattr(operations, name)(*arguments)
        if isinstance(result, torch.Tensor):
            return result + 1
        parts = result[0] + 1, *result[1:]
        return type(result)(*parts) if hasattr(result, "_fields") else parts

    spec = LATENT if name == "latent_rope_store" else replace(STATES, has_experts=True)
    if name in ("index_rope_store", "index_weights", "select_slots"):
        spec = SPARSE
    assert "wrong on this device" in (self_check(with_operations(**{name: wrong}), spec) or "")


@pytest.mark.parametrize(
    ("module", "setting", "value", "invariant"),
    [
        (decode, "UNIT", 32, False),
        (prefill, "dot_width", lambda head_dim: head_dim // 2, False),
        (invariant_decode, "SPLIT_SIZE", 128, True),
        (invariant_prefill, "TILE_ROWS", 64, True),
    ],
)
def test_a_bug_in_an_attention_kernel_is_refused(
    module: Any, setting: str, value: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units and splits that do not reach the next one, half heads, queries that no tile covers."""
    monkeypatch.setattr(module, setting, value)
    kernels = Kernels(TritonAttention(invariant=invariant), operations)
    assert "attention is wrong" in (self_check(kernels, SPEC) or "")


@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        LATENT,
        AttentionSpec(6, 2, 32, 64, torch.float16, SPEC.device, (None, 100), 30.0, True),
        replace(SPEC, dtype=torch.float16, cache_dtype=torch.int8),
    ],
)
def test_attention_has_the_same_bits_or_is_not_taken_for_such(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ordinary kernels round differently alone and in a chunk."""
    monkeypatch.setattr(plan, "persistent_programs", lambda *_: 20)
    assert (
        check_batch_invariance(Kernels(TritonAttention(invariant=True), operations), spec) is None
    )
    told = check_batch_invariance(Kernels(TritonAttention(), operations), spec) or ""
    assert "batch-invariant attention is wrong" in told


def test_what_cannot_be_compiled_is_refused() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of resource: shared memory\n(many lines)")

    reason = self_check(with_operations(silu_mul=fail), SPEC)
    assert reason is not None
    assert reason.endswith("cannot run on this device: out of resource: shared memory")


def test_a_check_that_loses_the_gpu_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference kernels would fail there too, and so would every later engine."""

    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\n...")

    kernels = with_operations(silu_mul=lost)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert "cannot run on this device" in (self_check(kernels, SPEC) or "")
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    told = r"GPU was lost in the check of triton's norms.*: CUDA error: an illegal memory access"
    with pytest.raises(NoKernelsError, match=told):
        self_check(kernels, SPEC)
    # The checks of products run while the model loads.
    monkeypatch.setattr(load, "_load_decoder", lambda *_: self_check(kernels, SPEC))
    with pytest.raises(ModelLoadError, match=told):
        load.load_runner(EngineConfig(model=str(default_model_dir())))


def test_auto_takes_them_on_a_gpu_that_they_have_proved_themselves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu = AttentionSpec(4, 2, 32, 16, torch.float32, torch.device("cuda"))
    monkeypatch.setattr(backend, "device_unsupported_reason", lambda _: None)
    for reason, expected in ((None, "triton"), ("its sampling is wrong", "reference")):
        monkeypatch.setattr(selfcheck, "self_check", lambda *_, reason=reason: reason)
        chosen, refusals = select_kernels("auto", on_gpu)
        assert chosen.name == expected
        assert refusals[:1] == ([] if reason is None else [("triton", reason)])
    monkeypatch.setattr(selfcheck, "self_check", lambda *_: None)
    monkeypatch.setattr(selfcheck, "check_batch_invariance", lambda *_: "other bits")
    with pytest.raises(NoKernelsError, match=r"triton: other bits.*reference: its sums depend"):
        select_kernels("auto", on_gpu, invariant=True)
    # On a CPU only by name, whatever the check would return.
    monkeypatch.setattr(selfcheck, "self_check", lambda *_: None)
    assert select_kernels("auto", SPEC)[0].name != "triton"
    assert select_kernels("triton", SPEC)[0].name == "triton"
    assert select.ATTENTION_BACKENDS[0] == "auto"
