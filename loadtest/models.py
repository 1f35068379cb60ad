"""Creates models of chosen sizes with random weights, in Hugging Face format.

Speed does not depend on the values of the weights, so a benchmark needs no download: a byte-level
BPE tokenizer is trained on generated words, and the weights are drawn from N(0, 0.02).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.workloads import make_text

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a decoder; ``family`` is the Hugging Face ``model_type``."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 32_000


SHAPES = {
    "0.5b": ModelShape("qwen2", 24, 896, 14, 2, 4864),  # 387 M parameters
    "100m": ModelShape("llama", 12, 768, 12, 4, 2048),
    "tiny": ModelShape("llama", 6, 256, 8, 4, 768),  # 13 M parameters
}


def ensure_model(
    shape: ModelShape, directory: Path, *, dtype: str = "bfloat16", seed: int = 0
) -> Path:
    """Return the model in ``directory``, creating it unless a complete one is there already.

    Args:
        shape: its sizes.
        directory: its location, created with its parents.
        dtype: torch's name of the weights' dtype.
        seed: the seed of the weights and of the tokenizer's training text.
    """
    done = directory / "made.json"
    recipe = json.dumps({"shape": vars(shape), "dtype": dtype, "seed": seed})
    if done.exists() and done.read_text() == recipe:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, shape.vocab, seed)
    _write_weights(directory, shape, dtype, seed)
    done.write_text(recipe)  # last: its presence marks the model as complete
    return directory


def _write_tokenizer(directory: Path, vocab: int, seed: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (make_text(200, rng) for _ in range(max(20, vocab // 32)))
    tokenizer.train_from_iterator(texts, trainer)
    # A small alphabet of syllables may yield fewer merges than requested. Fill up, so that every id
    # that the model can choose has a text of its own.
    missing = vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f" filler{index}" for index in range(missing)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL_TOKENS[2],
        "pad_token": _SPECIAL_TOKENS[0],
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _write_weights(directory: Path, shape: ModelShape, dtype: str, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Create one model and print its directory."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args(argv)
    print(ensure_model(SHAPES[options.shape], options.directory, dtype=options.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
