"""The choice of linear method, what it reports, and answers under each method."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.models.linear import DenseLinear, UnquantizedLinearMethod
from engine.quantization import choose_method, cpu, packed_unsupported_reason
from engine.quantization.dequant import DequantLinear
from engine.runner import device as device_module
from engine.runner.device import choose_dtype
from kernels.cpu import linear
from kernels.packed import PackedParts
from kernels.reference.quantised import quantise_int4
from tests.kernels import cpu_targets

CPU = torch.device("cpu")
HIDDEN_SIZE = 256  # of the demo model
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

native = pytest.mark.skipif(not linear.is_available(), reason="no native kernels here")


@pytest.fixture
def no_native(monkeypatch):
    monkeypatch.setattr(linear, "is_available", lambda: False)


@pytest.fixture
def kernels_of_a_gpu(monkeypatch):
    """The results of their self-checks, without a device; None means correct."""
    check_products = pytest.importorskip("kernels.triton.check_products")
    says = {"skinny": None, "packed": None}
    monkeypatch.setattr("kernels.triton.launch.device_unsupported_reason", lambda _: None)
    monkeypatch.setattr(check_products, "check_skinny", lambda *_: says["skinny"])
    monkeypatch.setattr(check_products, "check_packed", lambda *_: says["packed"])
    monkeypatch.setattr(check_products, "check_scaled", lambda *_: None)
    return says


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_gpu_takes_few_rows_where_the_kernels_are_right(kernels_of_a_gpu, caplog, quantization):
    """Dense layers, and the head of a model with rounded layers."""
    skinny, weight = pytest.importorskip("engine.quantization.skinny"), torch.zeros(64, 64)
    for reason, kind in ((None, skinny.SkinnyLinear), ("it is wrong", DenseLinear)):
        kernels_of_a_gpu["skinny"] = reason
        with caplog.at_level("INFO"):
            method = choose_method(quantization, torch.bfloat16, torch.device("cuda"))
        assert type(method.make_head(weight)) is kind
        assert type(method.make_unquantized(weight)) is kind
        assert quantization or (reason or "triton for one row") in caplog.text


@pytest.mark.parametrize("stored", ["GPTQ, 4 bits", "FP8 in blocks", "GGUF Q4_K"])
def test_a_gpu_multiplies_codes_where_the_kernels_are_right(stored, kernels_of_a_gpu, caplog):
    """Decided by format, device and the kernel's self-check, without querying a device."""
    gpu = pytest.importorskip("engine.quantization.gpu")
    on_gpu, weight = torch.device("cuda"), quantise_int4(torch.randn(32, 64))
    for reason, layer in ((None, gpu.TritonPacked), ("its products are wrong", DequantLinear)):
        kernels_of_a_gpu["packed"] = reason
        caplog.clear()
        with caplog.at_level("INFO"):
            method = choose_method(None, torch.bfloat16, on_gpu, checkpoint_format=stored)
        assert isinstance(method.make(PackedParts((weight,)), None), layer)
        assert stored in caplog.text
        assert (reason or "triton") in caplog.text
        assert packed_unsupported_reason(torch.bfloat16, on_gpu) == reason


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "nf4", "fp8"])
@pytest.mark.parametrize(
    "how", [pytest.param("native", marks=native), "torch"], ids=["native", "torch"]
)
def test_the_demo_model_answers(quantization, how, request, caplog):
    if how == "torch":
        request.getfixturevalue("no_native")
    with caplog.at_level("INFO"), LLM(quantization=quantization, dtype="bfloat16") as llm:
        info = llm.model_info()
        answer = llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert "Paris" in answer
    assert ("linear layers: native" in caplog.text) == (how == "native")
    parameters, told = info.num_parameters, info.memory.weights_bytes
    # The head of a model in four bits is int8; with torch alone it stays in bfloat16.
    bytes_each = {None: 2.0, "int8": 1.1, "fp8": 1.1, "int4": 0.9, "nf4": 0.9}[quantization]
    spare = 0 if how == "native" else parameters * 0.6
    if how == "native" and quantization is None:  # kernels/cpu/screened.py: int8 codes, two scales
        spare = info.vocab_size * (HIDDEN_SIZE + 8)
    assert parameters * 0.5 < told <= parameters * bytes_each * 1.01 + spare


@pytest.mark.parametrize("quantization", ["int8", "int4", "nf4", "fp8"])
@pytest.mark.usefixtures("no_native")
def test_without_native_kernels_quantisation_warns_that_it_is_slow(quantization, caplog):
    method = choose_method(quantization, torch.float32, CPU)
    assert "slow" in caplog.text
    weight = torch.randn(20, 50)
    bias, x = torch.randn(20), torch.randn(3, 50)
    layer = method.make(weight, bias)
    exact = torch.nn.functional.linear(x, weight, bias)
    most = {"int8": 0.02, "fp8": 0.05}.get(quantization, 0.15)
    assert (layer(x) - exact).norm() / exact.norm() < most


@pytest.mark.usefixtures("no_native")
@pytest.mark.parametrize("packs", [True, False])
def test_without_native_kernels_bfloat16_is_packed_by_onednn_where_it_can(packs, monkeypatch):
    if packs and not cpu.onednn_packs_bfloat16():
        pytest.skip("this processor has no instructions for it")
    monkeypatch.setattr(cpu, "onednn_packs_bfloat16", lambda: packs)
    method = choose_method(None, torch.bfloat16, CPU)
    assert isinstance(method.dense, cpu.OneDnnMethod) == packs
    weight, bias = torch.randn(64, 96).bfloat16(), torch.randn(64).bfloat16()
    for rows in (1, 7, 130):
        x = torch.randn(rows, 96).bfloat16()
        exact = x.double() @ weight.double().T + bias.double()
        error = (method.make(weight, bias)(x).double() - exact).norm() / exact.norm()
        assert error < 5e-3


def test_float32_needs_no_packing():
    assert isinstance(choose_method(None, torch.float32, CPU).dense, UnquantizedLinearMethod)


@pytest.mark.parametrize(("computes", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_on_a_cpu_is_what_it_multiplies_in(monkeypatch, computes, expected):
    monkeypatch.setattr(device_module, "_has_fast_bfloat16", lambda: computes)
    for checkpoint in ("float32", "bfloat16", None):
        assert choose_dtype("auto", checkpoint, CPU) == getattr(torch, expected)
    assert choose_dtype("float32", "bfloat16", CPU) == torch.float32


@pytest.mark.parametrize(("there", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_without_instructions_for_bfloat16_is_that_where_kernels_widen_it(
    monkeypatch, there, expected
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(linear, "is_available", lambda: there)
    assert choose_dtype("auto", "bfloat16", CPU) == expected


@native
@pytest.mark.slow
@pytest.mark.parametrize("target", ["avx2", "avx2-vnni"])
def test_a_model_answers_as_on_a_processor_without_avx512(target, monkeypatch, caplog):
    cpu_targets.use(target, monkeypatch)
    monkeypatch.setenv("QUIRE_CPU_TARGET", target)
    for quantization in (None, "int8", "int4"):
        caplog.clear()
        with caplog.at_level("INFO"), LLM(quantization=quantization, dtype="bfloat16") as llm:
            answer = llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text
        assert "Paris" in answer
        assert f"native kernels for {target}, {quantization or 'bfloat16'}" in caplog.text
