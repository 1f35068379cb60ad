"""A tiny random teacher with the demo model's tokenizer, and chats to train on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from demo import corpus
from demo.evaluate import MODEL
from demo.modelling import num_parameters


def save_teacher(folder: Path, **changes: object) -> Path:
    """Save a Llama with two layers; its embedding is scaled so that its choices vary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    shape = {
        "vocab_size": 3072,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape | changes))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(MODEL / name, folder / name)
    assert num_parameters(model) < 300_000
    return folder


def save_chats(path: Path, number: int = 60) -> Path:
    """The first conversations of the demo model's corpus, as JSONL."""
    with path.open("w", encoding="utf-8") as file:
        for conversation in corpus.shard(24, size=number):
            kept = {
                k: conversation[k] for k in ("messages", "tools", "text") if conversation.get(k)
            }
            file.write(json.dumps(kept) + "\n")
    return path
