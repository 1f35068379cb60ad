"""The output of ``quire quantize``, loaded by transformers with compressed-tensors' own code."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import tiny_models
from tests.tools.test_quantize_model import dequantised, recipe, windows
from tools.quantize.run import Job, quantise

pytest.importorskip("compressed_tensors")

WRITTEN: dict[str, dict[str, Any]] = {
    "int4": {},
    "int4, one scale an output": {"group_size": -1},
    "int4, zero points": {"symmetric": False},
    "int4, one scale and zero point an output": {"symmetric": False, "group_size": -1},
    "int8": {"scheme": "int8"},
    "int8, zero points": {"scheme": "int8", "symmetric": False},
    "w8a8": {"scheme": "w8a8", "group_size": None},
    "fp8": {"scheme": "fp8", "group_size": None},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_loads_each_format(name: str, tmp_path: Path) -> None:
    fields = WRITTEN[name]
    source = tiny_models.save("llama_bias", tmp_path / "source")
    quantise(Job(source, tmp_path / "out", recipe(algorithm="rtn", **fields)), windows())
    plain = tiny_models.build("llama_bias")
    plain.load_state_dict(dequantised(tmp_path / "out"))
    tokens = windows().held_out
    with torch.inference_mode():
        expected = plain(tokens).logits
    # Zero points only load in this way (docs/quantize.md); activations are only rounded otherwise.
    ways = [transformers.CompressedTensorsConfig(dequantize=True)]
    if fields.get("symmetric", True) and "scheme" not in fields:
        ways.append(None)
    for way in ways:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "out",
                dtype=torch.float32,
                attn_implementation="eager",
                **({} if way is None else {"quantization_config": way}),
            )
            logits = loaded.eval()(tokens).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("dequantize=True" in card) == (not fields.get("symmetric", True))
