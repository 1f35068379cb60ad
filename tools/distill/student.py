"""The student: read from a directory, created from a config, or a smaller teacher."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from tools.distill.errors import DistillError
from tools.distill.losses import layer_map
from tools.distill.models import load_config
from tools.distill.settings import StudentShape

# Config lists with an entry for each layer, which are shortened with the layers.
_BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
# option -> the config's names for it; a family has one of them.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "intermediate": ("intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
}


def student_config(teacher: Any, source: Path | None, shape: StudentShape) -> Any:
    """The config of `source` (a directory or a JSON file), or the teacher's config, shrunk.

    Raises DistillError if a dimension does not exist, or does not fit the others.
    """
    if source is not None:
        return load_config(source)
    config = copy.deepcopy(teacher)
    given = {name: value for name in _NAMES if (value := getattr(shape, name)) is not None}
    for name, value in given.items():
        if value < 1:
            raise DistillError(f"--student-{name.replace('_', '-')} must be at least 1")
        names = [known for known in _NAMES[name] if hasattr(config, known)]
        if not names:
            raise DistillError(f"a {config.model_type} model has no {_NAMES[name][0]}")
        setattr(config, names[0], value)
    if "hidden" in given and "head_dim" not in given and getattr(config, "head_dim", None):
        config.head_dim = config.hidden_size // config.num_attention_heads
    if shape.layers is not None:
        _shrink_lists(teacher, config, shape.layers)
    if shape.tie_embeddings:
        config.tie_word_embeddings = True
    _check(config)
    return config


def _shrink_lists(teacher: Any, config: Any, layers: int) -> None:
    for name in _BY_LAYER:
        if isinstance(kinds := getattr(teacher, name, None), list):
            picked = [kinds[layer - 1] for layer in layer_map(layers, len(kinds))]
            setattr(config, name, picked)


def _check(config: Any) -> None:
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:
        raise DistillError(
            f"{heads} heads cannot share {kv_heads} KV heads: give --student-kv-heads a divisor"
        )
    if hasattr(config, "validate"):
        try:
            config.validate()
        except Exception as error:  # huggingface_hub raises its own class; the cause is last
            reason = (str(error).strip().splitlines() or [repr(error)])[-1].strip()
            raise DistillError(f"no {config.model_type} model of this shape: {reason}") from None


def make_student(config: Any, seed: int, eager_attention: bool) -> Any:
    """A float32 model with seeded random weights. eager_attention: see models.load_model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    implementation = "eager" if eager_attention else None
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=implementation
    )
    model.config.use_cache = False
    return model


@torch.no_grad()
def init_from_teacher(student: Any, teacher: Any) -> list[str]:
    """Initialise the student from the teacher; returns the names of the inherited tensors.

    Tensors of the same shape are copied, with layers mapped by :func:`layer_map`. A narrower
    embedding is projected on the directions of largest variance of the teacher's (its right
    singular vectors), so that words that are similar to the teacher are similar from the start. The
    rest stays random.
    """
    theirs = teacher.state_dict()
    ours = student.state_dict()
    mapped = layer_map(*(_num_layers(model) for model in (student, teacher)))
    same_width = _width(student) == _width(teacher)
    taken = []
    for name, tensor in ours.items():
        source = theirs.get(
            re.sub(r"\.(\d+)\.", lambda m: f".{_layer(mapped, m[1])}.", name, count=1)
        )
        if source is None:
            continue
        if source.shape == tensor.shape and same_width:
            tensor.copy_(source.float())
        elif _is_vocabulary(student, tensor) and tensor.shape[1] < source.shape[1]:
            tensor.copy_(_project_embedding(source.float(), tensor.shape[1]))
        else:
            continue
        taken.append(name)
    return taken


def _project_embedding(embedding: torch.Tensor, width: int) -> torch.Tensor:
    """[vocab, hidden] to [vocab, width], preserving inner products as well as possible."""
    _, directions = torch.linalg.eigh(embedding.T @ embedding)  # ascending
    return embedding @ directions[:, -width:]


def _is_vocabulary(model: Any, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and tensor.shape[0] == model.config.get_text_config().vocab_size


def _layer(mapped: list[int], index: str) -> int:
    return mapped[int(index)] - 1 if int(index) < len(mapped) else int(index)


def _num_layers(model: Any) -> int:
    return model.config.get_text_config().num_hidden_layers


def _width(model: Any) -> int:
    return model.config.get_text_config().hidden_size
