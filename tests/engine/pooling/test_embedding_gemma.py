"""EmbeddingGemma: Gemma 3 with attention to both sides, and dense layers behind its pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelLoadError
from engine.models.families import read_spec
from engine.pooling import PoolingParams
from tests import tiny_encoders
from tests.engine.pooling.drive import embed, load

# As published with google/embeddinggemma-300m, by transformers 4.57.
PUBLISHED: dict[str, Any] = {
    **{"_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "dtype": "float32"},
    **{"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None},
    **{"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "final_logit_softcapping": None},
    **{"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768},
    **{"initializer_range": 0.02, "intermediate_size": 1152, "max_position_embeddings": 2048},
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
    **{"model_type": "gemma3_text", "num_attention_heads": 3, "num_hidden_layers": 24},
    **{"num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06},
    **{"rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0},
    **{"sliding_window": 512, "transformers_version": "4.57.0.dev0", "use_cache": True},
    **{"use_bidirectional_attention": True, "vocab_size": 262144},
}
# As published with google/embeddinggemma-2, but for its encoders' own configs.
PUBLISHED_2: dict[str, Any] = {
    **{"model_type": "embedding_gemma2", "architectures": ["EmbeddingGemma2Model"]},
    **{"audio_config": {"model_type": "gemma4_audio"}, "audio_token_id": 258881},
    **{"boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16"},
    **{"eoa_token_index": 258883, "eoi_token_id": 258882, "image_token_id": 258880},
    **{"initializer_range": 0.02, "transformers_version": "5.23.0", "video_token_id": 258884},
    "vision_config": {"model_type": "gemma4_vision"},
    "text_config": {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2},
        **{"dtype": "bfloat16", "embedding_dim": 768, "eos_token_id": 1, "head_dim": 256},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 512},
        **{"hidden_size_per_layer_input": 512, "initializer_range": 0.02},
        **{"intermediate_size": 2048, "max_position_embeddings": 262144},
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
        **{"model_type": "embedding_gemma2_text", "num_attention_heads": 4},
        **{"num_hidden_layers": 24, "num_key_value_heads": 2, "pad_token_id": 0},
        "per_layer_config": {
            place: {"head_dim": 512, "num_key_value_heads": 1} for place in ("05", "11", "17", "23")
        },
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        **{"sliding_window": 512, "vocab_size": 262144},
    },
}
IDENTITY = "torch.nn.modules.linear.Identity"
TANH = "torch.nn.modules.activation.Tanh"


def add_modules(directory: Path, *modules: tuple[str, dict[str, Any]]) -> list[Any]:
    """Write modules behind the transformer and random weights of dense ones, which it returns."""
    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    weights = []
    for place, (name, config) in enumerate(modules, 1):
        path = f"{place}_{name}"
        kind = f"sentence_transformers.models.{name}"
        listed.append({"idx": place, "path": path, "type": kind})
        (directory / path).mkdir(exist_ok=True)
        (directory / path / "config.json").write_text(json.dumps(config))
        if name == "Dense":
            linear = torch.nn.Linear(
                config["in_features"], config["out_features"], bias=config.get("bias", True)
            ).requires_grad_(False)
            tensors = {f"linear.{key}": value for key, value in linear.state_dict().items()}
            save_file(tensors, directory / path / "model.safetensors")
            weights.append(linear)
    (directory / "modules.json").write_text(json.dumps(listed))
    return weights


def dense(inputs: int, outputs: int, activation: str = IDENTITY, **more: Any) -> Any:
    sizes = {"in_features": inputs, "out_features": outputs}
    return "Dense", {**sizes, "bias": False, "activation_function": activation, **more}


MEAN = ("Pooling", {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True})
NORMALIZE = ("Normalize", {})


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 160, (n,), generator=generator).tolist() for n in lengths]


def test_the_published_config_is_an_encoder_with_half_of_its_window_to_either_side() -> None:
    spec = read_spec(PUBLISHED)
    assert (spec.max_context_len, spec.window, len(spec.local_layers)) == (2048, 256, 20)
    causal = read_spec({**PUBLISHED, "use_bidirectional_attention": False})
    assert type(causal) is not type(spec)


def test_the_second_generation_is_read_as_published() -> None:
    spec = read_spec(PUBLISHED_2)
    assert (spec.default_context_len, spec.max_context_len, spec.window) == (8192, 262144, 512)
    assert (spec.kv_heads(4), spec.kv_heads(5)) == ((2, 256), (1, 512))
    assert (spec.output_size, spec.checkpoint_dtype) == (768, "bfloat16")
    alone = read_spec(PUBLISHED_2["text_config"])
    assert alone == spec


def test_the_second_generation_reads_text_without_its_other_encoders(tmp_path: Path) -> None:
    """In a checkpoint of the whole model, whose tensors for images and sound are not used."""
    from safetensors.torch import load_file

    model = tiny_encoders.save("embedding_gemma2", tmp_path, max_position_embeddings=400)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    text = json.loads(config.read_text())
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    for name in ("vision_tower.x.weight", "embed_audio.embedding_projection.weight"):
        tensors[name] = torch.zeros(3, 4)
    save_file(tensors, file)
    whole = {**PUBLISHED_2, "text_config": text, "dtype": "float32"}
    config.write_text(json.dumps(whole))
    add_modules(tmp_path, MEAN, NORMALIZE)
    core, texts = load(tmp_path, step_tokens=600), prompts(390, 3, 341, 40)
    assert core.info.pooling.size == 56
    vectors = embed(core, texts, PoolingParams(kind="mean"))
    for index, tokens in enumerate(texts):
        with torch.no_grad():
            pooled = model(torch.tensor([tokens])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vectors[index], pooled / pooled.norm(), atol=1e-5)


def test_texts_go_through_pooling_dense_layers_and_normalisation(tmp_path: Path) -> None:
    model = tiny_encoders.save("embedding_gemma", tmp_path, max_position_embeddings=400)
    first, second = add_modules(tmp_path, MEAN, dense(48, 96), dense(96, 20), NORMALIZE)
    # The longest is cut into blocks where attention is local.
    core, texts = load(tmp_path, step_tokens=600), prompts(390, 3, 341, 40)
    assert (core.info.pooling.size, core.info.pooling.normalize) == (20, True)
    vectors = embed(core, texts, PoolingParams(kind="mean"))
    cut = embed(core, texts[:1], PoolingParams(kind="mean", dimensions=7))[0]
    for index, text in enumerate(texts):
        with torch.no_grad():
            pooled = model(torch.tensor([text])).last_hidden_state[0].mean(0)
        expected = second(first(pooled))
        np.testing.assert_allclose(vectors[index], expected / expected.norm(), atol=1e-5)
        if not index:
            np.testing.assert_allclose(cut, expected[:7] / expected[:7].norm(), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        (IDENTITY, lambda x: x),
        (TANH, torch.tanh),
        (None, torch.tanh),  # sentence-transformers' default
        ("torch.nn.modules.activation.ReLU", torch.relu),
        ("torch.nn.modules.activation.GELU", torch.nn.functional.gelu),
    ],
)
def test_activations_and_biases_of_dense_layers(tmp_path: Path, name, function) -> None:
    """As LaBSE and distiluse have them, behind any encoder."""
    model = tiny_encoders.save("bert", tmp_path)
    cls = ("Pooling", {"pooling_mode_cls_token": True})
    _, config = dense(48, 32, bias=True)
    if name is None:
        del config["activation_function"]
    else:
        config["activation_function"] = name
    (layer,) = add_modules(tmp_path, cls, ("Dense", config))
    core, (text,) = load(tmp_path), prompts(20)
    assert (core.info.pooling.kind, core.info.pooling.normalize) == ("cls", False)
    with torch.no_grad():
        expected = function(layer(model(torch.tensor([text])).last_hidden_state[0, 0]))
    vector = embed(core, [text], PoolingParams(kind="cls", normalize=False))[0]
    np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([MEAN, dense(48, 20, "torch.nn.modules.activation.Mish")], "activation_function.*Mish"),
        ([MEAN, dense(48, 20, "somebody.elses.Tanh")], "activation_function.*somebody"),
        ([MEAN, dense(48, 20, use_residual=True)], "use_residual"),
        ([MEAN, dense(48, 20, module_input_name="token_embeddings")], "module_input_name"),
        ([MEAN, dense(48, 20, module_output_name="scores")], "module_output_name"),
        ([MEAN, dense(40, 20)], "40 numbers.*48"),
        ([MEAN, dense(48, 20), dense(21, 20)], "21 numbers.*20"),
        ([dense(48, 20), NORMALIZE], "'Dense' before the pooling"),
        ([MEAN, NORMALIZE, dense(48, 20)], "'Dense'.*not supported"),
        ([MEAN, ("LayerNorm", {"dimension": 48})], "'LayerNorm' is not supported"),
    ],
)
def test_what_is_not_supported_is_an_error_that_names_it(tmp_path: Path, modules, named) -> None:
    tiny_encoders.save("bert", tmp_path)
    add_modules(tmp_path, *modules)
    with pytest.raises(ModelLoadError, match=named):
        load(tmp_path)


def test_modules_of_a_models_own_code_are_refused(tmp_path: Path) -> None:
    """Whatever they are called: as jina-embeddings-v3's transformer is."""
    tiny_encoders.save("bert", tmp_path)
    add_modules(tmp_path, MEAN)
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[0]["type"] = "custom_st.Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ModelLoadError, match=r"'custom_st.Transformer' is code of its own"):
        load(tmp_path)


def test_dense_layers_whose_files_are_not_theirs_are_errors(tmp_path: Path) -> None:
    tiny_encoders.save("bert", tmp_path)
    add_modules(tmp_path, MEAN, dense(48, 20))
    file = tmp_path / "2_Dense" / "model.safetensors"
    save_file({"linear.weight": torch.zeros(20, 47)}, file)
    with pytest.raises(ModelLoadError, match=r"linear.weight.*\[20, 47\]"):
        load(tmp_path)
    torch.save({"linear.weight": torch.zeros(20, 48)}, file.with_name("pytorch_model.bin"))
    file.unlink()
    with pytest.raises(ModelLoadError, match="--load-format bin"):
        load(tmp_path)


def test_a_dense_layer_as_a_pickle_is_read_on_request(tmp_path: Path) -> None:
    """The format is each directory's own: a model of pickles may have dense layers as safetensors,
    and has both as pickles where it was saved so."""
    model = tiny_encoders.save("bert", tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    (layer,) = add_modules(tmp_path, MEAN, dense(48, 20))
    (text,) = prompts(9)
    params = PoolingParams(kind="mean", normalize=False)
    mixed = embed(load(tmp_path, load_format="bin"), [text], params)[0]
    file = tmp_path / "2_Dense" / "model.safetensors"
    torch.save({"linear.weight": layer.weight}, file.with_name("pytorch_model.bin"))
    file.unlink()
    pickles = embed(load(tmp_path, load_format="bin"), [text], params)[0]
    np.testing.assert_array_equal(pickles, mixed)


def test_without_files_dense_layers_are_random_too(tmp_path: Path) -> None:
    tiny_encoders.save("embedding_gemma", tmp_path)
    add_modules(tmp_path, MEAN, dense(48, 20), NORMALIZE)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").unlink()
    core = load(tmp_path, load_format="dummy")
    vector = embed(core, prompts(9), PoolingParams(kind="mean"))[0]
    assert vector.shape == (20,)
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
