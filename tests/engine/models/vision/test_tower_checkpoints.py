"""The encoder's tensors in checkpoints: under older and newer names, in shards, damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import LoadFormat
from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config, read_headers
from engine.models.vision.config import VisionConfig
from engine.models.vision.tower import VisionTower, load_tower, tower_unsupported_reason
from engine.models.vision.weights import is_vision_tensor
from tests import tiny_vision

CPU = torch.device("cpu")
KINDS = [
    *("qwen2_5_vl", "qwen3_vl", "mistral3", "llava_clip", "llava_siglip"),
    *("gemma3", "gemma4", "idefics3", "internvl"),
]
PARTS = (
    *("visual", "vision_tower", "multi_modal_projector", "embed_vision"),
    *("vision_model", "connector"),
)


def vision_of(directory: Path) -> VisionConfig:
    vision = read_config(str(directory)).vision
    assert vision is not None
    return vision


def load(directory: Path, load_format: LoadFormat = "auto") -> VisionTower:
    return load_tower(
        vision_of(directory), read_headers(directory, load_format), torch.float32, CPU
    )


def same(one: VisionTower, other: VisionTower) -> bool:
    cell = one.spec.cell_size
    side = (one.spec.image_size or 3 * cell) // cell * cell
    pixels = torch.arange(side * side * 3).remainder(251).to(torch.uint8).view(side, side, 3)
    return torch.equal(one.embed(pixels).embeddings, other.embed(pixels).embeddings)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Save the checkpoint again with tensors changed, or removed if None."""
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path)
    return kept


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_older_and_newer_exports(tmp_path, kind):
    tiny_vision.save(kind, tmp_path)
    before = load(tmp_path)
    renamed = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        own = name.removeprefix("model.")
        if own.partition(".")[0] in PARTS:
            name = own if name.startswith("model.") else f"model.{own}"
        renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    assert same(load(tmp_path), before)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_and_pickles(tmp_path, kind):
    model = tiny_vision.build(kind)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    before = load(tmp_path / "whole")
    assert same(load(tmp_path / "shards"), before)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    torch.save(tensors, tmp_path / "whole" / "pytorch_model.bin")
    assert same(load(tmp_path / "whole", "bin"), before)


def test_what_stands_behind_the_features_is_not_looked_at(tmp_path):
    """An older export's names, and its table of position ids."""
    tiny_vision.save("llava_clip", tmp_path)
    before = load(tmp_path)
    renamed = {"vision_tower.vision_model.embeddings.position_ids": torch.arange(5)[None]}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        renamed[name.replace("vision_tower.", "vision_tower.vision_model.")] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    assert tower_unsupported_reason(headers) is None
    assert same(load(tmp_path), before)
    assert before.spec.num_layers == 2


def test_random_weights_are_those_of_the_seed(tmp_path):
    tiny_vision.save("qwen3_vl", tmp_path)
    vision = vision_of(tmp_path)
    towers = [load_tower(vision, [], torch.float32, CPU, seed=seed) for seed in (1, 1, 2)]
    assert same(towers[0], towers[1])
    assert not same(towers[0], towers[2])


def test_bytes_are_those_of_the_tensors(tmp_path):
    model = tiny_vision.save("qwen2_vl", tmp_path)
    numbers = sum(parameter.numel() for parameter in model.model.visual.parameters())
    folded = model.model.visual.patch_embed.proj.weight.numel() // 2  # an image is both frames
    assert load(tmp_path).num_bytes == 4 * (numbers + folded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"visual.blocks.1.attn.proj.bias": None}, r"missing tensors \(1\): .*blocks.1.attn.proj"),
        ({"visual.blocks.9.attn.proj.bias": torch.ones(32)}, "'visual.blocks.9.* has no place"),
        ({"visual.merger.ln_q.weight": torch.ones(31)}, r"shape \[31\], config.json asks for \[32"),
        ({"model.visual.merger.ln_q.weight": torch.ones(32)}, "appears twice"),
    ],
)
def test_damaged_encoders_are_named(tmp_path, changes, message):
    tiny_vision.save("qwen2_vl", tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("qwen2_5_vl", "visual.blocks.0.mlp.up_proj"),
        ("idefics3", "model.vision_model.encoder.layers.0.mlp.fc1"),
        ("internvl", "vision_tower.encoder.layer.0.mlp.fc1"),
    ],
)
def test_an_encoder_that_is_quantised_or_not_there_is_refused(tmp_path, kind, weight):
    tiny_vision.save(kind, tmp_path)
    assert tower_unsupported_reason(read_headers(tmp_path)) is None
    rewrite(
        tmp_path,
        **{f"{weight}.weight": None, f"{weight}.qweight": torch.zeros((4, 5), dtype=torch.int32)},
    )
    assert (
        tower_unsupported_reason(read_headers(tmp_path))
        == f"its encoder is quantised ('{weight}.qweight')"
    )
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, **{name: None for name in tensors if is_vision_tensor(name)})
    reason = "the checkpoint has no tensors of its encoder"
    assert tower_unsupported_reason(read_headers(tmp_path)) == reason
