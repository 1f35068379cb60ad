"""BLOOM and MPT: slopes by Hugging Face's code, published configs, ranks' heads."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.models.families import read_spec
from engine.models.families.alibi import slopes
from engine.parallel.shard import Shard, shard_spec
from tests import tiny_models
from tests.engine.models.test_parity import CHUNKS, paged_logits

_BLOOM = {
    **{"model_type": "bloom", "n_embed": 64, "n_layer": 2, "num_attention_heads": 8},
    **{"vocab_size": 100, "seq_length": 1024, "layer_norm_epsilon": 1e-5, "unk_token_id": 0},
    **{"attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "pretraining_tp": 4},
    **{"masked_softmax_fusion": True, "offset_alibi": 100, "skip_bias_add": True},
    **{
        "skip_bias_add_qkv": False,
        "slow_but_exact": False,
        "n_inner": None,
        "torch_dtype": "bfloat16",
    },
    **{"apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"]},
}
_MPT = {
    **{"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 8, "expansion_ratio": 4},
    **{"vocab_size": 100, "max_seq_len": 1024, "no_bias": True, "learned_pos_emb": True},
    **{"init_config": {"name": "kaiming_normal_"}, "init_device": "cpu", "logit_scale": None},
    **{"emb_pdrop": 0, "resid_pdrop": 0, "embedding_fraction": 1.0, "verbose": 0},
    **{"norm_type": "low_precision_layernorm", "tokenizer_name": "EleutherAI/gpt-neox-20b"},
    "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
    "attn_config": {
        **{"alibi": True, "alibi_bias_max": 16, "attn_impl": "torch", "attn_pdrop": 0},
        **{"attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": 6},
        **{"prefix_lm": False, "qk_ln": False, "softmax_scale": None},
    },
}


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 112])
def test_slopes_are_hugging_faces(num_heads):
    ones = torch.ones(1, 2, dtype=torch.long)
    theirs = build_alibi_tensor(ones, num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(slopes(num_heads)), theirs)
    for largest in (8, 16):
        theirs = -build_mpt_alibi_tensor(num_heads, 2, largest)[:, 0, 0]
        torch.testing.assert_close(torch.tensor(slopes(num_heads, largest)), theirs)


def test_published_configs_are_understood():
    bloom, mpt = read_spec(_BLOOM), read_spec(_MPT)
    assert bloom.embedding_norm
    assert not mpt.embedding_norm
    for spec in (bloom, mpt):
        assert (spec.hidden_size, spec.intermediate_size, spec.num_layers) == (64, 256, 2)
        assert (spec.max_context_len, spec.tie_word_embeddings) == (1024, True)
    assert bloom.alibi_slopes == slopes(8)
    assert (mpt.alibi_slopes, mpt.qkv_clip) == (slopes(8, 16), 6)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**_BLOOM, "n_embed": 60}, "'num_attention_heads' must divide the 60"),
        ({**_BLOOM, "hidden_size": 32}, "'hidden_size' is 32; only 64"),
        (
            {**_BLOOM, "apply_residual_connection_post_layernorm": True},
            "'apply_residual_connection_post_layernorm' is True",
        ),
        ({**_MPT, "no_bias": False}, "'no_bias' is False"),
        ({**_MPT, "expansion_ratio": 2}, "'expansion_ratio' is 2"),
        ({**_MPT, "logit_scale": "inv_sqrt_d_model"}, "'logit_scale' is"),
        *(
            ({**_MPT, "attn_config": {**_MPT["attn_config"], key: value}}, f"'{key}'")
            for key, value in (
                *(("alibi", False), ("qk_ln", True), ("prefix_lm", True), ("kv_n_heads", 2)),
                *(("attn_type", "multiquery_attention"), ("alibi_bias_max", 0)),
            )
        ),
    ],
)
def test_what_they_do_not_do_is_named(config, named):
    with pytest.raises(ModelLoadError, match=named):
        read_spec(config)


def test_each_rank_has_the_slopes_of_its_heads(tmp_path):
    spec = read_config(str(tiny_models.save("bloom", tmp_path))).spec
    assert spec.alibi_slopes is not None
    ranks = [shard_spec(spec, Shard(rank, 3)) for rank in range(3)]
    assert sum((rank.alibi_slopes or () for rank in ranks), ()) == spec.alibi_slopes
    assert [len(rank.alibi_slopes or ()) for rank in ranks] == [2, 2, 2]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_published_file_has_the_names_of_the_model_without_its_head(backend, tmp_path):
    """BLOOM's names begin with the layers' own."""
    model = tiny_models.build("bloom")
    tokens = list(range(40, 40 + sum(CHUNKS)))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    model.transformer.save_pretrained(tmp_path)
    tiny_models.edit_config(tmp_path, architectures=["BloomForCausalLM"])
    logits = paged_logits(tmp_path, tokens, attention_backend=backend)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
