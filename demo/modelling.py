"""The network: a Llama of about 3.7 million parameters, and its export in Hugging Face format."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from demo.template import TEMPLATE_PATH
from demo.tokenizer import END_OF_TEXT, IM_END, MAX_CONTEXT, VOCAB_SIZE


def new_model(seed: int) -> LlamaForCausalLM:
    """A float32 model with seeded random weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=MAX_CONTEXT,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=IM_END,
            pad_token_id=END_OF_TEXT,
        )
    )


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (bf16) and the template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "torch_dtype": "bfloat16",
    }
    generation = {
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "do_sample": False,
    }
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        text = json.dumps(value, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copyfile(TEMPLATE_PATH, folder / "chat_template.jinja")


def num_parameters(model: LlamaForCausalLM) -> int:
    """The number of distinct parameters; the tied embedding counts once."""
    return sum(p.numel() for p in model.parameters())
