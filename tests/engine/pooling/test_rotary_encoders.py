"""Encoders with rotary positions: their windows, their checkpoints and published configs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn import functional

from engine.errors import ModelLoadError
from engine.models.encoder import attention
from engine.models.encoder.spec import EncoderSpec, HeadSpec
from engine.models.families import read_spec
from engine.models.rope_spec import RopeSpec
from engine.pooling import PoolingParams
from engine.runner import load as load_module
from tests import tiny_encoders
from tests.engine.pooling.drive import embed, load
from tests.engine.pooling.test_encoder_parity import prompts, states

MEAN = PoolingParams(kind="mean", normalize=False)
LONG = 300  # more than two blocks of local attention

# As published, without the keys of training that all configs have.
MODERNBERT = {
    **{"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]},
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281},
    **{"classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0},
    **{"classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True},
    **{"deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282},
    **{"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_size": 768},
    **{"gradient_checkpointing": False, "hidden_activation": "gelu", "mlp_dropout": 0.0},
    **{"initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152},
    **{"layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0},
    **{"max_position_embeddings": 8192, "mlp_bias": False, "norm_bias": False, "norm_eps": 1e-05},
    **{"num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283},
    **{"position_embedding_type": "absolute", "reference_compile": None, "sep_token_id": 50282},
    **{"sparse_pred_ignore_index": -100, "sparse_prediction": False, "vocab_size": 50368},
    **{"tie_word_embeddings": True, "torch_dtype": "float32", "transformers_version": "4.48.0"},
}
NOMIC = {
    **{"model_type": "nomic_bert", "architectures": ["NomicBertModel"]},
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    **{"activation_function": "swiglu", "attn_pdrop": 0.0, "bos_token_id": None, "causal": False},
    **{"dense_seq_output": True, "embd_pdrop": 0.0, "eos_token_id": None, "fused_bias_fc": True},
    **{"fused_dropout_add_ln": True, "initializer_range": 0.02, "layer_norm_epsilon": 1e-12},
    **{"max_trained_positions": 2048, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "n_embd": 768},
    **{"n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "parallel_block": False},
    **{"pad_vocab_size_multiple": 64, "parallel_block_tied_norm": False, "prenorm": False},
    **{"qkv_proj_bias": False, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0},
    **{"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
    **{"rotary_emb_scale_base": None, "rotary_scaling_factor": None, "scale_attn_weights": True},
    **{"scale_attn_by_inverse_layer_idx": False, "summary_activation": None},
    **{"summary_first_dropout": 0.0, "summary_proj_to_labels": True, "summary_type": "cls_index"},
    **{"summary_use_proj": True, "torch_dtype": "float32", "type_vocab_size": 2},
    **{"use_cache": True, "use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True},
    "vocab_size": 30522,
}


@pytest.mark.parametrize(
    ("lengths", "window", "block"),
    [((300, 299, 241), 5, 128), ((64, 50), 3, 16), ((33, 33), 20, 8), ((9, 2, 1), 0, 4)],
)
def test_local_attention_is_that_of_a_mask(monkeypatch, lengths, window, block):
    monkeypatch.setattr(attention, "_BLOCK_TOKENS", block)
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn((sum(lengths), 3 * 12), generator=generator)
    buckets = attention.make_buckets(lengths, fused.device, window=window)
    assert any(bucket.local is not None for bucket in buckets)
    found = attention.attend(fused, buckets, 3, is_local=True)
    for text, attended in zip(fused.split(list(lengths)), found.split(list(lengths)), strict=True):
        query, key, value = text.view(-1, 3, 3, 4).permute(1, 2, 0, 3)
        at = torch.arange(len(text))
        near = (at[:, None] - at).abs() <= window
        expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=near)
        torch.testing.assert_close(attended, expected.transpose(0, 1).reshape(-1, 12))
    whole = attention.attend(fused, buckets, 3)
    assert (whole - found).abs().max() > 0.1


def test_memory_of_local_attention_grows_with_the_text():
    (short,), (long,) = (
        attention.make_buckets((length,), torch.device("cpu"), window=64) for length in (512, 8192)
    )
    assert short.local is not None
    assert long.local is not None
    assert long.local.mask.numel() == 16 * short.local.mask.numel()
    assert long.mask is None


@pytest.mark.parametrize("kind", ["modernbert", "modernbert_biases"])
def test_texts_of_several_blocks_equal_hugging_face(tmp_path, kind):
    model = tiny_encoders.save(kind, tmp_path, max_position_embeddings=LONG)
    texts = prompts(LONG, LONG - 1, 290, 129, 5)
    found = embed(load(tmp_path), texts, MEAN)
    for index, text in enumerate(texts):
        expected = states(model, text).mean(0).numpy()
        np.testing.assert_allclose(found[index], expected, atol=1e-4)


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("kind", ["modernbert_biases", "nomic_bert"])
def test_rounded_weights_and_values_give_nearly_the_same(tmp_path, kind, changes):
    model = tiny_encoders.save(kind, tmp_path)
    (text,) = prompts(40)
    found = torch.from_numpy(embed(load(tmp_path, **changes), [text], MEAN)[0].copy())
    expected = states(model, text).mean(0)
    assert torch.cosine_similarity(found, expected, dim=0) > 0.99


def _spec_with(**changes):
    return lambda spec: dataclasses.replace(spec, **changes)


MUTANTS = {
    "window off by one": ("modernbert", _spec_with(window=5)),
    "windows in no layer": ("modernbert", _spec_with(local_layers=frozenset())),
    "windows in other layers": ("modernbert", _spec_with(local_layers=frozenset({0, 1}))),
    "one rope for all layers": ("modernbert", _spec_with(local_rope=RopeSpec(160_000.0))),
    "another base": ("nomic_bert", _spec_with(rope=RopeSpec(10_000.0))),
    "another epsilon": ("modernbert_biases", _spec_with(norm_eps=1e-5)),
    "another activation": ("nomic_bert", _spec_with(activation="gelu")),
    "gates first": ("gte", _spec_with(gate_last=False)),
    "a window that includes its edge": ("embedding_gemma", _spec_with(window=9)),
    "scores scaled by the heads' width": ("embedding_gemma", _spec_with(attention_scale=None)),
    "embeddings as they are": ("embedding_gemma", _spec_with(embedding_scale=1.0)),
    "norms' weights as they are": ("embedding_gemma", _spec_with(rms_offset=0.0)),
    "values without a norm": ("embedding_gemma2", _spec_with(value_norm=False)),
    "a window of half the radius": ("embedding_gemma2", _spec_with(window=4)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_parity_catches_a_wrong_spec(tmp_path, monkeypatch, name):
    kind, mutate = MUTANTS[name]
    model = tiny_encoders.save(kind, tmp_path)
    read = load_module.read_config

    def mutated(directory):
        config = read(directory)
        return dataclasses.replace(config, spec=mutate(config.spec))

    monkeypatch.setattr(load_module, "read_config", mutated)
    (text,) = prompts(60)
    difference = embed(load(tmp_path), [text], MEAN)[0] - states(model, text).mean(0).numpy()
    assert np.abs(difference).max() > 1e-3


def test_a_masked_language_model_is_an_encoder_without_its_head(tmp_path):
    import transformers

    config_class, values = tiny_encoders.KINDS["modernbert"]
    config = getattr(transformers, config_class)(**values)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    (text,) = prompts(20)
    vector = embed(load(tmp_path), [text], MEAN)[0]
    np.testing.assert_allclose(vector, states(model.model, text).mean(0).numpy(), atol=1e-4)


def test_a_bias_that_the_config_denies_is_refused(tmp_path):
    tiny_encoders.save("modernbert", tmp_path, num_labels=1)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, "head.norm.bias": torch.zeros(48)}, path)
    with pytest.raises(ModelLoadError, match=r"head\.norm\.bias.* has no place"):
        load(tmp_path)


def test_nomics_own_names_and_keys_are_read(tmp_path):
    model = tiny_encoders.save("nomic_bert", tmp_path, intermediate_size=128)
    hub = {**NOMIC, "n_embd": 48, "n_head": 6, "n_layer": 3, "n_inner": 128, "n_positions": 128}
    hub |= {"max_trained_positions": 64, "vocab_size": 150, "pad_vocab_size_multiple": 32}
    hub |= {"max_position_embeddings": 64, "layer_norm_epsilon": 1e-4}
    (tmp_path / "config.json").write_text(json.dumps(hub))
    tensors = {}
    for name, tensor in _with_fused(model.state_dict(), "qkv", "self_attn.{}_proj", "attn.Wqkv"):
        name = name.replace("embeddings.LayerNorm", "emb_ln").replace("layers.", "encoder.layers.")
        for ours, theirs in (
            *(("self_attn.o_proj", "attn.out_proj"), ("mlp.up_proj", "mlp.fc11")),
            *(("mlp.gate_proj", "mlp.fc12"), ("mlp.down_proj", "mlp.fc2")),
            *(("post_attention_layernorm", "norm1"), ("post_mlp_layernorm", "norm2")),
        ):
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    core, texts = load(tmp_path), prompts(128, 30)
    assert core.info.max_model_len == 128
    found = embed(core, texts, MEAN)
    for index, text in enumerate(texts):
        expected = states(model, text).mean(0).numpy()
        np.testing.assert_allclose(found[index], expected, atol=1e-4)


def test_gtes_own_names_are_read(tmp_path):
    model = tiny_encoders.save("gte", tmp_path)
    state = _with_fused(model.state_dict(), "qkv", "self_attn.{}_proj", "attention.qkv_proj")
    tensors = {}
    for name, tensor in _with_fused(dict(state), ("up", "gate"), "mlp.{}_proj", "mlp.up_gate_proj"):
        for ours, theirs in (
            *(("layers.", "encoder.layer."), ("self_attn.o_proj", "attention.o_proj")),
            *(("post_attention_layernorm", "attn_ln"), ("post_mlp_layernorm", "mlp_ln")),
        ):
            name = name.replace(ours, theirs)
        tensors[f"new.{name}"] = tensor
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (text,) = prompts(30)
    vector = embed(load(tmp_path), [text], MEAN)[0]
    np.testing.assert_allclose(vector, states(model, text).mean(0).numpy(), atol=1e-4)


# Of gte-multilingual-base, without sizes.
GTE = {
    **{"architectures": ["NewModel", "NewForTokenClassification"], "model_type": "new"},
    **{"auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"}, "pad_token_id": 1},
    **{"attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0, "hidden_act": "gelu"},
    **{"hidden_dropout_prob": 0.1, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02},
    **{"layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm", "torch_dtype": "float16"},
    **{"logn_attention_clip1": False, "logn_attention_scale": False, "pack_qkv": True},
    **{"position_embedding_type": "rope", "rope_theta": 20000, "type_vocab_size": 1},
    **{"rope_scaling": {"factor": 8.0, "type": "ntk"}, "transformers_version": "4.39.1"},
    **{"unpad_inputs": False, "use_memory_efficient_attention": False},
}


def test_gte_divides_its_frequencies(tmp_path):
    """As Hugging Face's conversions say it, and as Alibaba's own configs do."""
    factor = 8 ** (2 / 8)  # for heads of 8
    rope = {"rope_type": "linear", "rope_theta": 160_000.0, "factor": factor}
    model = tiny_encoders.save("gte", tmp_path, rope_parameters=rope, hidden_act="gelu")
    text = prompts(90)
    expected = states(model, text[0]).mean(0).numpy()
    np.testing.assert_allclose(embed(load(tmp_path), text, MEAN)[0], expected, atol=1e-4)
    file = tmp_path / "model.safetensors"
    sparse = {"classifier.weight": torch.ones(1, 48), "classifier.bias": torch.ones(1)}
    safetensors.torch.save_file({**safetensors.torch.load_file(file), **sparse}, file)
    saved = json.loads((tmp_path / "config.json").read_text())
    sizes = {key: saved[key] for key in saved if key.startswith(("num_", "max_", "vocab_"))}
    sizes |= {key: saved[key] for key in ("hidden_size", "intermediate_size")}
    (tmp_path / "config.json").write_text(json.dumps({**GTE, **sizes}))
    own = embed(load(tmp_path), text, MEAN)[0]
    np.testing.assert_allclose(own, expected, atol=1e-4)
    snowflake = {**GTE, **sizes, "model_type": "gte", "rope_theta": 160_000, "rope_scaling": None}
    spec = read_spec(snowflake)
    assert isinstance(spec, EncoderSpec)
    assert spec.rope == RopeSpec(160_000.0)


def _with_fused(state, parts, pattern, fused):
    """Yield the tensors of a state, with those of ``parts`` as one that has the ``fused`` name."""
    first, *others = (pattern.format(part) for part in parts)
    for name, tensor in state.items():
        if first in name:
            whole = [tensor, *(state[name.replace(first, other)] for other in others)]
            yield name.replace(first, fused), torch.cat(whole)
        elif not any(other in name for other in others):
            yield name, tensor.contiguous()


def test_published_configs_are_read():
    spec = read_spec(MODERNBERT)
    assert isinstance(spec, EncoderSpec)
    assert (spec.rope, spec.local_rope) == (RopeSpec(160_000.0), RopeSpec(10_000.0))
    assert (spec.window, spec.max_context_len, spec.num_labels) == (64, 8192, 0)
    assert sorted(set(range(22)) - spec.local_layers) == list(range(0, 22, 3))
    reranker = read_spec({**MODERNBERT, "architectures": ["ModernBertForSequenceClassification"]})
    assert reranker.num_labels == 2
    assert isinstance(reranker, EncoderSpec)
    assert reranker.head == HeadSpec("mean", "gelu", bias=False, has_norm=True)
    nomic = read_spec(NOMIC)
    assert isinstance(nomic, EncoderSpec)
    assert (nomic.vocab_size, nomic.max_context_len, nomic.rope) == (30528, 8192, RopeSpec(1000.0))
    both = {"hidden_size": 768, "max_position_embeddings": 2048, "hidden_act": "silu"}
    both["rope_parameters"] = {"rope_theta": 1000.0, "rope_type": "default"}
    assert read_spec({**NOMIC, **both}) == nomic
    # Scaled frequencies are those of short texts up to the trained length.
    assert read_spec({**NOMIC, "rotary_scaling_factor": 2}).max_context_len == 2048


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (MODERNBERT, {"layer_types": ["chunked_attention"] * 22}, "'layer_types'"),
        (MODERNBERT, {"classifier_pooling": "late"}, "'classifier_pooling'"),
        (MODERNBERT, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling'"),
        (MODERNBERT, {"rope_parameters": {"rope_type": "yarn"}}, "unsupported keys"),
        (
            *(MODERNBERT, {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
            "'rope_type' is 'yarn'",
        ),
        (MODERNBERT, {"hidden_size": 780}, "'num_attention_heads' must leave heads of an even"),
        (MODERNBERT, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (MODERNBERT, {"is_decoder": True}, "is_decoder"),
        (GTE, {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, "'mixed_b' is set"),
        (GTE, {"logn_attention_scale": True}, "'logn_attention_scale' is True"),
        (NOMIC, {"causal": True}, "'causal'"),
        (NOMIC, {"prenorm": True}, "'prenorm'"),
        (NOMIC, {"qkv_proj_bias": None}, "'qkv_proj_bias'"),
        (NOMIC, {"num_experts": 8}, "'num_experts'"),
        (NOMIC, {"rotary_emb_fraction": None}, "'rotary_emb_fraction'"),
        (NOMIC, {"rotary_emb_scale_base": 512}, "'rotary_emb_scale_base'"),
        (NOMIC, {"activation_function": "gelu"}, "'activation_function'"),
        (NOMIC, {"hidden_size": 512}, "'hidden_size' is 512"),
        (NOMIC, {"rope_parameters": {"rope_theta": 10.0}}, "'rotary_emb_base' is 1000"),
        (NOMIC, {"head_dim": 32}, "'head_dim'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, changes, reason):
    with pytest.raises(ModelLoadError, match=reason):
        read_spec({**config, **changes})


EUROBERT = {
    **{"model_type": "eurobert", "architectures": ["EuroBertForMaskedLM"]},
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token": "<|begin_of_text|>"},
    **{"auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}, "bos_token_id": 128000},
    **{"clf_pooling": "late", "eos_token": "<|end_of_text|>", "eos_token_id": 128001},
    **{"head_dim": 64, "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 1152},
    **{"intermediate_size": 3072, "is_decoder": False, "mask_token": "<|mask|>"},
    **{"mask_token_id": 128002, "max_position_embeddings": 8192, "mlp_bias": False},
    **{"num_attention_heads": 18, "num_hidden_layers": 26, "num_key_value_heads": 6},
    **{"pad_token": "<|end_of_text|>", "pad_token_id": 128001, "pretraining_tp": 1},
    **{"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000, "use_cache": False},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256},
}


def test_eurobert_is_read_as_published():
    spec = read_spec(EUROBERT)
    assert (spec.kv_heads(0), spec.rope, spec.max_context_len) == ((6, 64), RopeSpec(250_000), 8192)
    scored = {**EUROBERT, "architectures": ["EuroBertForSequenceClassification"]}
    with pytest.raises(ModelLoadError, match="'classifier_pooling' is 'late'"):
        read_spec(scored)  # the mean of all tokens' scores
    assert read_spec({**scored, "clf_pooling": "mean"}).head.pooling == "mean"
