"""Tiny random models in Hugging Face format, one for each family and RoPE variant.

    directory = tiny_models.save("qwen3", tmp_path)

They have no tokenizer. ``tests/engine/models`` compares them with Hugging Face's own code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import tiny_kinds
from tests.tiny_gemmas import GEMMAS, GEMMAS_3N
from tests.tiny_hybrids import HYBRIDS
from tests.tiny_shape import ABSENT, SHAPE

_SEEING = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2.0},
    **{"image_size": 28, "patch_size": 7, "max_position_embeddings": 16},
}
KINDS = tiny_kinds.KINDS | GEMMAS | GEMMAS_3N | HYBRIDS

# One of each family, except for those that differ from others only in names and numbers.
FAMILIES = [
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "smollm3",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4_moe",
        "gemma4_shared",
    ),
    *("granite", "phi3", "olmo2", "stablelm", "cohere", "cohere2", "gpt2", "gpt_neox"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3", "llama4", "falcon_groups", "deepseek_v32", "glm_moe_dsa"),
    *("glm4", "glm4_moe", "minimax_m2", "ernie4_5_moe", "granitemoeshared", "exaone4", "olmo3"),
    *("ministral3", "nemotron", "starcoder2", "hunyuan_dense"),
    *("qwen3_next", "olmo_hybrid", "lfm2", "granitemoehybrid", "bamba", "nemotron_h", "falcon_h1"),
    *("nemotron_h_moe", "phimoe", "mamba2", "gpt_neo", "mimo_v2_flash", "apertus"),
    *("falcon_mamba", "jamba", "flex_olmo", "kimi_linear", "cohere2_moe", "step3p7"),
    *("bailing_hybrid", "gemma3n", "axk1", "bloom", "axk2", "longcat_flash", "muse_glimmer"),
]


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A Hugging Face model with random weights, large enough for each of its parts to matter."""
    import torch
    import transformers

    config_class, differences = KINDS[kind]
    keys = {**SHAPE, **differences, **changes}
    config = getattr(transformers, config_class)(
        **{key: value for key, value in keys.items() if value is not ABSENT}
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _new(config_class, config)
        for name, parameter in model.named_parameters():
            # Norms differ from one, biases from zero, and scores are far enough apart to be ranked.
            is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            # Not what DBRX has between two; Command R+'s heads have norms of their own.
            is_norm &= parameter.dim() == 1 or name.endswith(("q_norm.weight", "k_norm.weight"))
            is_norm |= name.endswith(("router.scale", "per_expert_scale"))
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.25)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()


def _new(config_class: str, config: Any) -> Any:
    import transformers

    if config_class == "Mistral4Config":  # registered only for whole models with images
        from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

        return Mistral4ForCausalLM(config)
    if config_class == "Step3p7TextConfig":  # likewise
        whole = transformers.Step3p7Config(text_config=config.to_dict(), vision_config=_SEEING)
        whole._attn_implementation = "eager"
        return transformers.Step3p7ForConditionalGeneration(whole)
    if config_class == "MuseGlimmerTextConfig":  # likewise
        whole = transformers.MuseGlimmerConfig(
            text_config=config.to_dict(), vision_config={**_SEEING, "intermediate_size": 32}
        )
        whole._attn_implementation = "eager"
        return transformers.MuseGlimmerForConditionalGeneration(whole)
    return transformers.AutoModelForCausalLM.from_config(config)


def save(kind: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Save ``build(kind)`` as a checkpoint; returns the directory."""
    model = build(kind, seed, **changes)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of a saved config.json; None removes a key."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def greedy_tokens(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """A prompt's greedy continuation by Hugging Face's own generate."""
    import torch

    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
