"""Expert parallelism: each expert is on one rank, and texts stay the same."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.parallel.shard import Shard, parameter_slices
from engine.runner import load_runner
from tests import gguf_files, tiny_models
from tests.engine.handmade import load
from tests.engine.parallel.test_shared_logits import logits_of, prompt, shared_logits
from tests.engine.quantization.test_formats import _write

WHOLE = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("mixtral", 2),  # five experts: one rank has two
        ("qwen2_moe", 2),  # and a shared expert
        ("qwen3_moe", 2),
        ("deepseek_v3", 3),
        ("gpt_oss", 2),  # all experts in one tensor of the file, with biases
        ("llama4", 2),  # weights multiply an expert's input
    ],
)
def test_ranks_say_what_hugging_face_says(tmp_path, kind, size):
    changes = {"intermediate_size": 96} if size == 3 else {}
    model = tiny_models.build(kind, **changes)
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(shared_logits(tmp_path, size, **WHOLE), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_experts_in_bfloat16_and_in_codes(tmp_path, quantization):
    """In the forms that the CPU kernels use."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    directory = tiny_models.save("mixtral", tmp_path, **shape)
    changes = {"dtype": "bfloat16", "quantization": quantization}
    exact, alone = logits_of(load(directory)), logits_of(load(directory, **changes))
    shared = shared_logits(directory, 2, **changes, **WHOLE)
    assert (shared - exact).norm() < 1.5 * (alone - exact).norm()


@pytest.mark.parametrize("written", ["w8a8", "awq"])
def test_codes_of_files(tmp_path, monkeypatch, written):
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)  # to the last bits
    directory, expected = _write("mixtral", written, tmp_path, hidden_size=128)
    torch.testing.assert_close(shared_logits(directory, 2, **WHOLE), expected, atol=1e-4, rtol=0)


def test_gguf_files(tmp_path):
    model = tiny_models.build("qwen2_moe", mlp_only_layers=[])
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    path = gguf_files.write(tmp_path / "model.gguf", model)
    torch.testing.assert_close(shared_logits(path, 2, **WHOLE), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "size"), [("mixtral", 3), ("gpt_oss", 4), ("deepseek_v3", 2)])
def test_each_expert_lies_with_one_rank(tmp_path, kind, size):
    whole = read_config(str(tiny_models.save(kind, tmp_path))).spec
    ranks = [
        parameter_slices(whole, Shard(rank, size, expert_parallel=True)) for rank in range(size)
    ]
    names = [name for name in ranks[0] if ".experts." in name]
    assert names
    for name in names:
        cuts = [cuts[name] for cuts in ranks]
        runs = [piece.full for cut in cuts for piece in cut.row_ranges(None)]
        (total, *_) = cuts[0].full.shape
        covered = [row for run in runs for row in range(run.start, run.stop)]
        assert sorted(covered) == list(range(total))
        assert all(cut.columns is None and not cut.is_zero for cut in cuts)


@pytest.mark.parametrize(
    ("size", "told"),
    [(1, "needs a tensor_parallel_size above 1"), (6, "the model has 5 experts")],
)
def test_what_cannot_be_done_is_refused(tmp_path, size, told):
    directory = tiny_models.save(
        "mixtral", tmp_path, num_attention_heads=6, num_key_value_heads=6, hidden_size=96
    )
    with pytest.raises(ModelLoadError, match=told):
        load_runner(EngineConfig(model=str(directory), tensor_parallel_size=size, **WHOLE))
