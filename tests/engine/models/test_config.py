"""Configs: both spellings are read, and unsupported values are rejected by name."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.models.families import read_spec
from engine.models.rope import inverse_frequencies
from engine.models.rope_spec import Llama3Scaling, YarnScaling
from engine.models.spec import DecoderSpec, LayerSpec

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def spec(**changes):
    return read_spec({**LLAMA, **changes})


def test_both_spellings_of_rope_are_one_spec():
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    older = spec(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    oldest = spec(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3})
    newer = spec(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert older == oldest == newer
    assert newer.rope.theta == 5e5
    assert newer.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 16)


def test_a_scaling_added_by_hand_decides():
    """As transformers does with both sections: the older one is what someone added."""
    longer = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    both = spec(rope_theta=5e5, rope_parameters=plain, rope_scaling=longer)
    assert both == spec(rope_theta=5e5, rope_scaling=longer)
    assert isinstance(both.rope.scaling, YarnScaling)


def test_both_spellings_of_dtype_and_null_as_absent():
    assert spec(torch_dtype="float16").checkpoint_dtype == "float16"
    assert spec(dtype="bfloat16").checkpoint_dtype == "bfloat16"
    assert spec(rope_scaling=None, head_dim=None, num_key_value_heads=None) == spec()


def test_context_that_scaling_allows():
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    yarn = spec(rope_scaling=scaled)
    assert isinstance(yarn.rope.scaling, YarnScaling)
    assert (yarn.default_context_len, yarn.max_context_len) == (256, 256)
    linear = spec(rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.max_context_len == 128
    dynamic = spec(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (dynamic.default_context_len, dynamic.max_context_len) == (64, 128)


def test_windows_of_qwen():
    base = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3}
    assert spec(**base).windows == (None,)
    used = spec(**base, use_sliding_window=True)
    assert used.layers == (LayerSpec(),) * 3 + (LayerSpec(window=8),)
    kinds = ["sliding_attention", "full_attention"] * 2
    listed = spec(**base, use_sliding_window=True, layer_types=kinds)
    assert [layer.window for layer in listed.layers] == [8, None, 8, None]
    every = spec(**{**base, "max_window_layers": 0}, use_sliding_window=True)
    assert every.windows == (8,)
    absent = spec(model_type="qwen2", sliding_window=8, use_sliding_window=True)
    assert absent.windows == (None,), "of so few layers: the class says 28"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gemma2", ["attn_logit_softcapping", "final_logit_softcapping", "sliding_window"]),
        ("gemma3n_text", ["final_logit_softcapping", "sliding_window"]),
        ("gpt_oss", ["sliding_window", "swiglu_limit"]),
        ("mistral", ["sliding_window"]),
        ("ministral", ["sliding_window"]),
        ("mixtral", ["rms_norm_eps", "rope_parameters"]),
    ],
)
def test_what_a_config_leaves_out_is_as_its_class_says(kind, keys):
    """Of what changes no shape, so that nothing would refuse the weights."""
    whole = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    del whole["transformers_version"]
    for key in keys:
        assert read_spec({name: whole[name] for name in whole if name != key}) == read_spec(whole)


def test_what_exports_write_besides_is_harmless():
    """Keys found in published checkpoints of these families."""
    extra = {
        "_name_or_path": "x",
        "architectures": ["LlamaForCausalLM"],
        "transformers_version": "4.40.1",
        "use_cache": True,
        "pretraining_tp": 1,
        "initializer_range": 0.04,
        "attention_dropout": 0.0,
        "transformers.js_config": {"dtype": "q4"},
        "is_llama_config": True,
        "rope_interleaved": False,
        "max_sequence_length": 2048,
        "top_p": 1.0,
        "quantization_config": None,
    }
    assert spec(**extra) == spec()


@pytest.mark.usefixtures("all_keys_matter")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "rwkv"}, "'rwkv' is not supported.*llama.*qwen3"),
        ({"model_type": None}, "not supported"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "'auto_map'.*never run"),
        ({"quantization_config": 4}, "'quantization_config'"),
        ({"logit_scale": 0.5}, "'logit_scale'"),
        ({"new_b": 1, "new_a": 2}, "'new_a', 'new_b'"),
        ({"model_type": "mistral", "attention_bias": True}, "'attention_bias'"),
        ({"model_type": "falcon", "alibi": True}, "'alibi' is true"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, "'num_ln_in_parallel_attn'"),
        ({"hidden_act": "xielu"}, "'hidden_act' is 'xielu'"),
        ({"hidden_size": "32"}, "'hidden_size' must be a positive integer"),
        ({"hidden_size": -32}, "'hidden_size'"),
        ({"hidden_size": 2**40}, "'hidden_size'"),
        ({"num_hidden_layers": 2**30}, "'num_hidden_layers'.*below 10000"),
        ({"rope_theta": 1}, "'rope_theta' must be a number above 1"),
        ({"vocab_size": None}, "'vocab_size' must be a positive integer"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' must divide"),
        ({"head_dim": 7}, "'head_dim' must be even"),
        ({"rms_norm_eps": True}, "'rms_norm_eps'"),
        ({"attention_bias": 1}, "'attention_bias' must be true or false"),
        ({"rope_scaling": {"type": "cubic"}}, "rope_scaling.*'cubic'; known:.*yarn"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "'beta'"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}}, "partial"),
        ({"eos_token_id": [1, -1]}, "'eos_token_id'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "'layer_types'"),
        ({"model_type": "qwen2", "layer_types": ["linear"] * 4}, "'linear'"),
        ({"model_type": "qwen2", "use_mrope": True}, "'use_mrope'"),
    ],
)
def test_refused_by_name(changes, named):
    with pytest.raises(ModelLoadError, match=named) as caught:
        spec(**changes)
    assert "\n" not in str(caught.value)


_ODD = st.sampled_from(
    [0, 1, -1, 2, 2**31 - 1, 2**70, 0.5, 1e-30, 1e300, "", "x", [], [1.0] * 4, {}, True, None]
)
_SECTION = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "dynamic", "llama3", "yarn", "longrope"])},
    optional={
        "factor": _ODD,
        "low_freq_factor": _ODD,
        "high_freq_factor": _ODD,
        "original_max_position_embeddings": _ODD,
        "short_factor": _ODD,
        "long_factor": _ODD,
        "attention_factor": _ODD,
        "beta_fast": _ODD,
        "mscale": _ODD,
        "mscale_all_dim": _ODD,
    },
)


@settings(max_examples=400, deadline=None)
@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "smollm3"]),
    changes=st.dictionaries(
        st.sampled_from([*LLAMA, "head_dim", "num_key_value_heads", "rope_theta", "layer_types"]),
        _ODD,
        max_size=2,
    ),
    scaling=st.none() | _SECTION,
)
def test_any_config_becomes_a_usable_spec_or_one_line(family, changes, scaling):
    config = {**LLAMA, **changes, "model_type": family, "rope_scaling": scaling}
    try:
        read = read_spec(config)
    except ModelLoadError as error:
        refusal = str(error)
    else:
        _check_usable(read)
        return
    assert "\n" not in refusal


def _check_usable(read: DecoderSpec) -> None:
    served = read.max_context_len
    assert served >= 1
    if read.head_dim > 1024:
        return  # an odd size that is not wrong
    frequencies, scale = inverse_frequencies(
        read.rope, read.head_dim, read.max_position_embeddings, served
    )
    assert frequencies.shape == (read.head_dim // 2,)
    assert bool(torch.isfinite(frequencies).all())
    assert scale > 0
