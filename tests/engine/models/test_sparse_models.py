"""Models whose queries attend to selected positions: configs, memory, codes, and speculation."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import SpeculationConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.models.families import read_spec
from tests import tiny_models
from tests.engine.handmade import load
from tests.engine.models.test_exported_configs import _INDEXED, _SIZES
from tests.engine.models.test_parity import paged_logits
from tests.engine.quantization import stored
from tests.engine.runner.test_speculation import GREEDY, config_of, generate, requests_of

CONFIG = {**_SIZES, **_INDEXED, "num_hidden_layers": 7, "auto_map": None}


def shared(**keys: object) -> list[bool]:
    config = {"model_type": "glm_moe_dsa", **CONFIG, **keys}
    return [layer.shares_selection for layer in read_spec(config).layers]


def letters(pattern: str) -> list[bool]:
    return [letter == "S" for letter in pattern]


def test_which_layers_share_a_selection() -> None:
    """As transformers' GlmMoeDsaConfig reads these keys."""
    assert shared() == letters("FFFFFFF")
    assert shared(index_topk_freq=4, index_skip_topk_offset=3) == letters("FFFSSSF")
    assert shared(index_topk_freq=2) == letters("FFSFSFS")
    assert shared(index_topk_freq=2, index_topk_pattern="FSSSFSS") == letters("FSSSFSS")
    kinds = ["full", "shared", "shared", "full", "full", "shared", "shared"]
    assert shared(indexer_types=kinds, index_topk_pattern="FFFFFFF") == letters("FSSFFSS")


@pytest.mark.usefixtures("all_keys_matter")
@pytest.mark.parametrize(
    ("kind", "keys", "named"),
    [
        ("glm_moe_dsa", {"index_topk_pattern": "SFFFFFF"}, "'index_topk_pattern' lets the first"),
        ("glm_moe_dsa", {"index_topk_pattern": "FFX"}, "'index_topk_pattern' must name a kind"),
        ("glm_moe_dsa", {"index_topk_pattern": "FFFXFFF"}, "'index_topk_pattern' has 'X'"),
        ("glm_moe_dsa", {"indexer_types": [["full"]] * 7}, "'indexer_types' has"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "'indexer_rope_interleave' is False"),
        ("deepseek_v32", {"index_topk_freq": 4}, "index_topk_freq"),
        ("deepseek_v32", {"q_lora_rank": None}, "'q_lora_rank' is absent"),
        ("deepseek_v32", {"index_head_dim": 2}, "'index_head_dim' is below the 4"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 7}, "'layer_types' has"),
        ("deepseek_v32", {"rope_interleave": False}, "'rope_interleave' is False"),
    ],
)
def test_what_is_not_understood_is_refused(kind: str, keys: dict, named: str) -> None:
    config = {"model_type": kind, **CONFIG, **keys}
    with pytest.raises(ModelLoadError, match=named):
        read_spec(config)


def test_index_keys_count_in_the_cache(tmp_path) -> None:
    """One more key per token and layer with an indexer, in the blocks of the latents."""
    for kind, indexers in (("deepseek_v32", 3), ("glm_moe_dsa", 2)):
        directory = tiny_models.save(kind, tmp_path / kind)
        spec = read_config(str(directory)).spec
        assert spec.kv_bytes_per_token(2) == (3 * (16 + 8) + indexers * 16) * 2
        runner = load(directory, num_blocks=10)
        tensors = runner._cache.tensors()
        memory = runner.info.memory
        assert sum(tensor.nbytes for tensor in tensors) == memory.kv_cache_bytes
        assert memory.bytes_per_token == spec.kv_bytes_per_token(4)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_a_checkpoint_in_fp8_blocks(kind: str, tmp_path, monkeypatch) -> None:
    """As they are published: all matrices but the router and the weights of index heads."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)  # it would round more
    dense, codes = tiny_models.save(kind, tmp_path / "dense"), tmp_path / "codes"
    meant, written = load_file(dense / "model.safetensors"), {}
    for name, tensor in list(meant.items()):
        is_dense = any(
            word in name for word in ("norm", "embed", "lm_head", "mlp.gate.", "weights_proj")
        )
        if tensor.ndim != 2 or is_dense:
            written[name] = tensor
            continue
        parts, value = stored.float8(tensor, form="block", name=".weight_scale_inv", block=(24, 40))
        written |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        meant[name] = value.float()
    assert any("indexer.wq_b.weight_scale_inv" in name for name in written)
    shutil.copytree(dense, codes)
    save_file(meant, dense / "model.safetensors", {"format": "pt"})
    save_file(written, codes / "model.safetensors", {"format": "pt"})
    fp8 = {
        **{"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"},
        **{"weight_block_size": [24, 40], "activation_scheme": "dynamic"},
    }
    tiny_models.edit_config(codes, quantization_config=fp8)
    expected = paged_logits(dense)
    torch.testing.assert_close(paged_logits(codes), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("schedule", [{}, {"num_blocks": 34}, {"max_num_batched_tokens": 9}])
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_guesses_change_no_text(kind: str, schedule: dict, tmp_path) -> None:
    """Rows that verify drafts have several tokens, each with a selection of its own.

    A model that drafts for itself is always right: its drafts select what its text does.
    """
    directory = str(tiny_models.save(kind, tmp_path / "model"))
    other = str(tiny_models.save("llama", tmp_path / "other"))
    expected, _, _ = generate(config_of(directory, None), requests_of(**GREEDY))
    for given in (
        {"method": "draft", "draft_model": directory},
        {"method": "draft", "draft_model": other},
        {"method": "ngram", "min_ngram": 1},
    ):
        speculation = SpeculationConfig(adaptive=False, **given)
        config = config_of(directory, speculation, **schedule)
        texts, _, core = generate(config, requests_of(**GREEDY))
        assert texts == expected
        stats = core.stats
        assert stats.drafts.num_draft_tokens > 0
        assert (stats.num_preemptions > 0) == ("num_blocks" in schedule)
        if given.get("draft_model") == directory:
            assert stats.drafts.num_accepted_tokens == stats.drafts.num_draft_tokens
