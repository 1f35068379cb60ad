"""Our package ``kernels`` does not conflict with the one that transformers looks for."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import kernels
from kernels.attention import AttentionSpec
from kernels.select import ATTENTION_BACKENDS, NoKernelsError, select_kernels


def test_transformers_imports_beside_our_package():
    assert not hasattr(kernels, "__version__")
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    assert module.LlamaForCausalLM is not None


def test_backends_are_named_and_losers_give_reasons():
    spec = AttentionSpec(4, 2, 8, 16, torch.float32, torch.device("cpu"))
    assert ATTENTION_BACKENDS == ("auto", "triton", "cpu", "reference")
    for name in ("auto", "reference"):
        half = replace(spec, dtype=torch.float16)
        assert select_kernels(name, half)[0].name == "reference"
    with pytest.raises(NoKernelsError, match="known: auto, triton, cpu, reference"):
        select_kernels("flash", spec)
    odd = AttentionSpec(5, 2, 8, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(NoKernelsError, match="reference: 5 heads"):
        select_kernels("auto", odd)
