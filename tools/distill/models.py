"""Loads, runs and saves teachers and students as transformers models."""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.distill.errors import DistillError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ISOLATION_TOKENS = 8
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Outputs:
    """logits: [num_learned, vocab]; hidden states and attentions as transformers returns them."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    attention: tuple[torch.Tensor, ...]


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one. Raises DistillError for a missing device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DistillError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: `auto` is bfloat16 if the device supports it natively."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float32
    quick = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if quick else torch.float32


def load_tokenizer(folder: str) -> Any:
    """The fast tokenizer of a model. Raises DistillError."""
    from transformers import AutoTokenizer

    _check_name(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DistillError(f"{folder}: no tokenizer: {_first_line(error)}") from None
    if not tokenizer.is_fast:
        raise DistillError(f"{folder}: a fast tokenizer (tokenizer.json) is needed")
    return tokenizer


def load_config(folder: str | Path) -> Any:
    """The config of a model. Raises DistillError."""
    from transformers import AutoConfig

    _check_name(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DistillError(f"{folder}: {_first_line(error)}") from None


def load_model(
    folder: str | Path, dtype: torch.dtype, device: torch.device, eager_attention: bool
) -> Any:
    """Load a causal model.

    eager_attention: with an attention implementation that returns its weights. Raises DistillError.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    _check_name(folder)
    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager" if eager_attention else None,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise DistillError(f"{folder}: {_first_line(error)}") from None
    model.config.use_cache = False
    return model.to(device)


def run(
    model: Any, inputs: torch.Tensor, positions: torch.Tensor, learned: torch.Tensor,
    hidden: bool = False, attention: bool = False,
) -> Outputs:  # fmt: skip
    """A forward pass over packed rows [rows, tokens] that computes logits for learned tokens only.

    The output matrix is the largest of a small model, and most tokens of a chat are questions. So
    the learned positions are selected from the head's input. Scaling and capping of logits that a
    family applies come after the head and still take effect.
    """
    head = model.get_output_embeddings()

    def pick(module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        del module
        return (arguments[0][learned].unsqueeze(0), *arguments[1:])

    hook = head.register_forward_pre_hook(pick)
    try:
        result = model(
            input_ids=inputs,
            position_ids=positions,
            use_cache=False,
            output_hidden_states=hidden,
            output_attentions=attention,
        )
    finally:
        hook.remove()
    return Outputs(result.logits[0], result.hidden_states or (), result.attentions or ())


@torch.no_grad()
def isolates_documents(model: Any) -> bool:
    """Whether attention is isolated between packed documents: changes one and observes another."""
    device = next(model.parameters()).device
    half = _ISOLATION_TOKENS
    vocabulary = model.config.get_text_config().vocab_size
    row = torch.arange(2 * half, device=device)[None] % vocabulary
    changed = row.clone()
    changed[0, :half] = (changed[0, :half] + 1 + half) % vocabulary
    positions = torch.arange(2 * half, device=device)[None] % half
    watched = torch.arange(2 * half, device=device)[None] >= half
    was_training = model.training
    model.eval()
    first, second = (run(model, ids, positions, watched).logits for ids in (row, changed))
    model.train(was_training)
    return torch.allclose(first.float(), second.float(), rtol=1e-3, atol=1e-3)


def check_vocabularies(teacher: Any, student: Any, folders: tuple[str, Path | None]) -> None:
    """Reject a student whose token ids have other meanings. The arguments are configs.

    Raises DistillError.
    """
    ours, theirs = (c.get_text_config().vocab_size for c in (student, teacher))
    if ours != theirs:
        raise DistillError(
            f"the vocabularies differ: the student has {ours} tokens, the teacher {theirs}"
        )
    paths = [Path(folder) / "tokenizer.json" for folder in folders if folder is not None]
    if len(paths) == 2 and all(path.is_file() for path in paths):
        first, second = (_vocabulary(path) for path in paths)
        if first != second:
            raise DistillError(f"the vocabularies differ: {paths[1]} is not that of the teacher")


def check_memory(
    teacher: Any, student: Any, bytes_a_weight: int, batch_tokens: int, device: torch.device
) -> None:
    """Reject what cannot fit, before it is loaded. The arguments are configs.

    Counted are the teacher's weights; for each of the student's weights itself, its gradient and
    Adam's two moments in float32; and for each token of a batch, four rows of logits in float32.

    Raises DistillError.
    """
    from engine.memory import available_bytes

    vocabulary = teacher.get_text_config().vocab_size
    needed = num_parameters(teacher) * bytes_a_weight + num_parameters(student) * 16
    needed += batch_tokens * vocabulary * 16
    free = available_bytes(device)
    if needed > free:
        raise DistillError(
            f"not enough memory: about {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} free; "
            "fewer --batch-rows with --accumulate, or shorter --row-tokens, need less"
        )


def num_parameters(config: Any) -> int:
    """The distinct parameters of a model with this config, counted without creating it."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def export(
    model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype, teacher: str, generation: Any
) -> None:
    """Write a model directory, each file atomically: weights in `dtype`, the teacher's tokenizer.

    If the teacher is a directory, its tokenizer files are copied unchanged. `generation` is its
    GenerationConfig: the tokens that end its turns, of which config.json may have only some.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = copy.deepcopy(model).to(dtype)
    saved.config.use_cache = True
    with staged(folder) as stage:
        saved.save_pretrained(stage)
        generation.to_json_file(stage / "generation_config.json")
        if not (Path(teacher) / "tokenizer.json").is_file():  # a name on the Hub, or older files
            tokenizer.save_pretrained(stage)
        for name in _TOKENIZER_FILES:
            if (Path(teacher) / name).is_file():
                shutil.copyfile(Path(teacher) / name, stage / name)


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield a folder in `folder`; its files move there, each atomically, if the block succeeds."""
    stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        yield stage
        for path in sorted(stage.iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _vocabulary(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path)).get_vocab()


def _check_name(folder: str | Path) -> None:
    """Raise DistillError for a missing path: transformers would look it up on the Hub."""
    if not Path(folder).exists() and _HUB_NAME.fullmatch(str(folder)) is None:
        raise DistillError(f"there is no model directory {folder}")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), repr(error))
