"""The widened demo model has the same outputs as the original."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo.evaluate import MODEL
from demo.widen import widen


def test_a_wide_model_has_the_same_logits(tmp_path: Path) -> None:
    assert widen(tmp_path, times=4, layers=6, intermediate=800, kv_heads=4) > 15e6
    small, wide = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (MODEL, tmp_path)
    )
    assert wide.config.hidden_size == 1024
    ids = torch.randint(3, 3072, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", [{"times": 8}, {"layers": 3}, {"kv_heads": 1}])
def test_shapes_that_cannot_hold_it_are_refused(tmp_path: Path, given: dict) -> None:
    with pytest.raises(ValueError, match=r"times must be|must not be smaller"):
        widen(tmp_path, **given)
