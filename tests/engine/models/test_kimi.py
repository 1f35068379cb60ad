"""Kimi K2 as it was published: DeepSeek-V3's layers under a name that Hugging Face's code lacks."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models.families import read_spec
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits, prompt
from tests.engine.quantization import stored

_YARN = {
    **{"beta_fast": 1.0, "beta_slow": 1.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "original_max_position_embeddings": 32,
}
_TWIN = {
    **{"hidden_size": 64, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-6},
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **_YARN},
}
_CONFIG = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "ep_size": 1},
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    **{"attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 1, "eos_token_id": 2},
    **{"first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 64, "use_cache": True},
    **{"initializer_range": 0.02, "intermediate_size": 80, "kv_lora_rank": 16},
    **{"max_position_embeddings": 128, "model_type": "kimi_k2", "moe_intermediate_size": 32},
    **{"moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 6, "n_shared_experts": 1},
    **{"norm_topk_prob": True, "num_attention_heads": 6, "num_experts_per_tok": 3},
    **{"num_hidden_layers": 3, "num_key_value_heads": 6, "num_nextn_predict_layers": 0},
    **{"pretraining_tp": 1, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8},
    **{"rms_norm_eps": 1e-6, "rope_scaling": {**_YARN, "type": "yarn"}, "rope_theta": 50000.0},
    **{"routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True},
    **{"tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc"},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.48.3", "v_head_dim": 12},
    "vocab_size": 160,
}
_FP8 = {
    **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
    "weight_block_size": [24, 40],
}
_THINKING = {
    "config_groups": {
        "group_0": {
            **{"input_activations": None, "output_activations": None, "targets": ["Linear"]},
            "weights": {
                **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32},
                **{"num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "type": "int"},
                **{"strategy": "group", "symmetric": True},
            },
        }
    },
    **{"format": "pack-quantized", "kv_cache_scheme": None, "quant_method": "compressed-tensors"},
    "ignore": [
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "quantization_status": "compressed",
}


def _all_but_router(name: str) -> bool:
    return "_proj" in name


def _experts(name: str) -> bool:
    return ".experts." in name


PUBLISHED = {
    "dense": (None, None, None),
    "fp8": (
        functools.partial(stored.float8, form="block", name=".weight_scale_inv", block=(24, 40)),
        _all_but_router,
        _FP8,
    ),
    "thinking": (functools.partial(stored.compressed_packed, group=32), _experts, _THINKING),
}


@pytest.mark.parametrize("outer", [False, True], ids=["K2", "K2.5"])
@pytest.mark.parametrize("form", PUBLISHED)
def test_logits_are_those_of_deepseek_v3_with_the_same_numbers(form, outer, tmp_path, monkeypatch):
    """Also as the text model of Kimi K2.5, whose section tells how it is quantised."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)  # compute in float32
    write, is_quantised, section = PUBLISHED[form]
    directory = tiny_models.save("deepseek_v3", tmp_path, **_TWIN)
    weights = directory / "model.safetensors"
    tensors, published = load_file(weights), {}
    for name, tensor in list(tensors.items()):
        if write is None or tensor.ndim != 2 or not is_quantised(name):
            published[name] = tensor
            continue
        parts, meant = write(tensor.float())
        published |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        tensors[name] = meant.float()
    save_file(tensors, weights, {"format": "pt"})
    expected = _hugging_face(directory)
    save_file(published, weights, {"format": "pt"})
    config = _CONFIG if section is None else {**_CONFIG, "quantization_config": section}
    if outer:
        renamed = {f"language_model.{name}": tensor for name, tensor in published.items()}
        save_file(renamed, weights, {"format": "pt"})
        config = {"model_type": "kimi_k25", "text_config": config, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(paged_logits(directory), expected, atol=1e-4, rtol=0)


def _hugging_face(directory) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([prompt()])).logits[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        ({"topk_method": "greedy"}, "'topk_method' is 'greedy'"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        ({"n_group": 4}, "'n_group' must divide the 6 experts"),
        ({"use_sparse_indexer": True}, "unsupported keys: 'use_sparse_indexer'"),
    ],
)
def test_what_would_change_answers_is_named(changes, named):
    with pytest.raises(ModelLoadError, match=named):
        read_spec({**_CONFIG, **changes})
