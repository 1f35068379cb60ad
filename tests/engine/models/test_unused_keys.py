"""Keys of published configs that the models' implementations do not read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.models.families import read_spec
from engine.models.unused_keys import unused_keys
from tests import tiny_models, tiny_vision

# As published, or as saved again by other tools.
PUBLISHED: dict[str, dict[str, Any]] = {
    "phi3": {
        **{"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
        **{"full_attn_mod": 1, "interpolate_factor": 1, "use_cache": True},
    },
    "gemma2": {"cache_implementation": "hybrid", "sliding_window_size": 4096},
    "qwen3_moe": {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    "qwen3_next": {"use_sliding_window": False},
    "llama": {"activation": "swiglu", "unsloth_fixed": True, "is_decoder": False},
    "cohere2": {
        **{"order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0},
        **{"position_embedding_type": "rope_gptj", "use_embedding_sharing": True},
    },
    "starcoder2": {"mlp_type": "default", "norm_type": "layer_norm", "rms_norm_eps": 1e-5},
    "falcon_h1": {"mlp_expansion_factor": 8},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs_are_read(kind: str, tmp_path: Path, caplog) -> None:
    directory = tiny_models.save(kind, tmp_path)
    expected = read_config(str(directory)).spec
    tiny_models.edit_config(directory, **PUBLISHED[kind])
    with caplog.at_level(logging.INFO):
        assert read_config(str(directory)).spec == expected
    ignored = [record for record in caplog.records if "not used by" in record.message]
    assert len(ignored) == 1, "whoever serves the model can see which keys do nothing"


def test_keys_of_nested_configs_are_their_own_models(tmp_path: Path) -> None:
    """A text model's type is not always that of an implementation's folder."""
    tiny_vision.save("qwen2_5_vl", tmp_path)
    expected = read_config(str(tmp_path))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config["text_config"]
    # As saved by transformers 4.55: some keys of the text model at both levels, and others of the
    # whole model in the text model's.
    config |= {key: text[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    config["sliding_window"] = 32768
    text |= {"vision_start_token_id": 3, "vision_token_id": 4, "is_decoder": False}
    file.write_text(json.dumps(config))
    found = read_config(str(tmp_path))
    assert found.spec == expected.spec
    assert found.vision == expected.vision


def test_only_what_no_implementation_reads_is_unused() -> None:
    keys = {"sliding_window", "hidden_size", "tie_word_embeddings", "attention_bias", "a_new_key"}
    assert unused_keys("gemma3_text", keys) == {"a_new_key"}
    assert unused_keys("qwen2", {"is_causal", "dual_chunk_attention_config"}) == {
        "dual_chunk_attention_config"
    }
    assert unused_keys("no_such_model", keys) == set(), "there is no implementation to ask"


def test_what_the_implementation_reads_is_refused(tmp_path: Path) -> None:
    directory = tiny_models.save("gpt_oss", tmp_path)
    tiny_models.edit_config(directory, layer_norm_cap=3, attn_implementation="eager")
    with pytest.raises(ModelLoadError, match=r"unsupported keys: 'attn_implementation'$"):
        read_config(str(directory))


def test_bands_of_llamas_rope_may_meet(tmp_path: Path) -> None:
    """As in Llama 4 Scout."""
    directory = tiny_models.save("llama", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config.pop("rope_parameters", None)
    scaling = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 32}
    config["rope_scaling"] = {**scaling, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    assert read_spec(config).rope is not None
    config["rope_scaling"]["high_freq_factor"] = 0.5
    with pytest.raises(ModelLoadError, match="must not be below low_freq_factor"):
        read_spec(config)


def test_windows_that_no_text_exceeds_are_none(tmp_path: Path) -> None:
    """As in Phi-3.5-mini and Phi-4-mini."""
    directory = tiny_models.save("phi3", tmp_path)
    spec = read_config(str(directory)).spec
    tiny_models.edit_config(directory, sliding_window=spec.max_position_embeddings)
    assert {layer.window for layer in read_config(str(directory)).spec.layers} == {None}
    tiny_models.edit_config(directory, sliding_window=spec.max_position_embeddings - 1)
    assert None not in {layer.window for layer in read_config(str(directory)).spec.layers}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("is_causal", False), ("use_bidirectional_attention", True), ("is_bidirectional", True)],
)
def test_attention_to_both_sides_is_never_ignored(kind, key, value, tmp_path: Path) -> None:
    """Their own code has it, and Hugging Face's of the same model_type may not: embedding models
    made of decoders (gte-Qwen2, voyage-4-nano) would give other vectors."""
    directory = tiny_models.save(kind, tmp_path)
    expected = read_config(str(directory)).spec
    tiny_models.edit_config(directory, **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        read_config(str(directory))
    tiny_models.edit_config(directory, **{key: not value})
    assert read_config(str(directory)).spec == expected
