"""Checkpoints: shards, casts and dummies load; damaged and hostile ones fail with one line."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import ModelLoadError
from engine.models import safetensors
from engine.models.safetensors import read_header, read_into
from tests import tiny_models
from tests.engine.handmade import Hand, load, request


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tiny_models.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def greedy(runner, count=6):
    hand = Hand(runner)
    hand.add(request("a", range(10, 30)))
    return hand.decode("a", count)


def write(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_shards_load_as_one_file_does(saved, tmp_path):
    tiny_models.build("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    seen = []
    sharded = load_with_progress(tmp_path, seen)
    assert greedy(sharded) == greedy(load(saved))
    assert [fraction for fraction, _ in seen] == sorted(fraction for fraction, _ in seen)
    assert seen[-1][0] == 1.0


def load_with_progress(directory, seen):
    from engine.config import CacheConfig, EngineConfig
    from engine.runner import load_runner

    config = EngineConfig(model=str(directory), num_threads=1, cache=CacheConfig(num_blocks=64))
    return load_runner(config, lambda fraction, what: seen.append((fraction, what)))


def test_tensors_are_read_and_cast_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "_STAGING_BYTES", 64)
    tensor = torch.randn(7, 33)
    save_file({"x": tensor, "half": tensor.to(torch.bfloat16)}, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    with header.path.open("rb") as file:
        for name, expected in (("x", tensor), ("half", tensor.to(torch.bfloat16).float())):
            target = torch.empty(7, 33)
            read_into(file, header.entries[name], target)
            assert torch.equal(target, expected)


def test_dummy_weights_need_a_config_alone(copy):
    info = load(copy).info
    (copy / "model.safetensors").unlink()
    first, again = (load(copy, load_format="dummy") for _ in range(2))
    other = load(copy, load_format="dummy", seed=1)
    assert first.info.num_parameters == info.num_parameters
    assert greedy(first) == greedy(again)
    assert first.info.fingerprint == again.info.fingerprint
    assert len({first.info.fingerprint, other.info.fingerprint, info.fingerprint}) == 3
    weight = first._model._modules.layers[0].mlp.gate_up.weight
    assert abs(weight.std().item() - 0.02) < 0.002
    assert not torch.equal(weight, other._model._modules.layers[0].mlp.gate_up.weight)
    assert bool((first._model._modules.norm.weight == 1).all())


def test_fingerprint_follows_config_and_weights(saved, copy):
    base = load(saved).info.fingerprint
    assert load(copy).info.fingerprint == base
    assert load(copy, dtype="float16").info.fingerprint != base
    assert load(copy, quantization="int8").info.fingerprint != base
    tiny_models.edit_config(copy, rope_parameters={"rope_type": "default", "rope_theta": 9e3})
    assert load(copy).info.fingerprint != base


def test_end_tokens_of_both_configs(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load(copy).info.eos_token_ids == (2, 7)


def test_the_tokenizers_end_token_ends_a_text_too(copy):
    """As in chat models that were tuned from base models, whose configs were left as they were."""
    named = {"eos_token": "<|im_end|>"}
    (copy / "tokenizer_config.json").write_text(json.dumps(named))
    assert load(copy).info.eos_token_ids == (2,), "of an unknown id"
    token = {"id": 9, "content": "<|im_end|>", "special": True}
    (copy / "tokenizer.json").write_text(json.dumps({"added_tokens": [token], "model": {}}))
    assert load(copy).info.eos_token_ids == (2, 9)
    (copy / "tokenizer.json").write_text("{")
    assert load(copy).info.eos_token_ids == (2,), "those who tokenise report the damage"
    older = {"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"11": {"content": "</s>"}}}
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps(older))
    assert load(copy).info.eos_token_ids == (2, 11)


def test_memory_plan_and_context(saved):
    info = load(saved, num_blocks=10).info
    assert info.max_model_len == 40  # ten blocks of four, below the model's 128
    assert load(saved).info.max_model_len == 128
    assert load(saved, max_model_len=100).info.max_model_len == 100
    memory = info.memory
    assert memory.bytes_per_token == 2 * 3 * 2 * 8 * 4
    assert memory.kv_cache_bytes == 10 * 4 * memory.bytes_per_token
    with pytest.raises(ModelLoadError, match=r"max_model_len 129.*context is 128"):
        load(saved, max_model_len=129)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_backend": "flash"}, "unknown attention backend 'flash'"),
        ({"device": "cuda"}, "no GPU"),
    ],
)
def test_settings_that_cannot_be_served(saved, changes, message):
    from engine.config import EngineConfig
    from engine.runner import load_runner

    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ModelLoadError, match=message):
        load_runner(EngineConfig(model=str(saved), **changes))


# ----------------------------------------------------------------------- rejected checkpoints


def _drop(name):
    def change(directory):
        tensors = load_file(directory / "model.safetensors")
        del tensors[name]
        save_file(tensors, directory / "model.safetensors")

    return change


def _put(name, tensor):
    def change(directory):
        tensors = load_file(directory / "model.safetensors")
        save_file({**tensors, name: tensor}, directory / "model.safetensors")

    return change


def _text(name, content):
    return lambda directory: (directory / name).write_bytes(content)


def _index(mapping):
    return _text("model.safetensors.index.json", json.dumps({"weight_map": mapping}).encode())


NORM = "model.norm.weight"
DAMAGES = {
    "no config": (lambda directory: (directory / "config.json").unlink(), "config.json: missing"),
    "config is not JSON": (_text("config.json", b"{"), "config.json: not valid JSON"),
    "config has what is no number": (
        _text("config.json", b'{"a": [0, Infinity], "b": NaN}'),
        "config.json: not valid JSON: NaN is no number",
    ),
    "config is a list": (_text("config.json", b"[]"), "config.json: not a JSON object"),
    "config nests deeply": (_text("config.json", b"[" * 100_000), "config.json: not valid JSON"),
    "no weights": (
        lambda directory: (directory / "model.safetensors").unlink(),
        "holds no .safetensors",
    ),
    "config of another size": (
        lambda directory: tiny_models.edit_config(directory, intermediate_size=96),
        r"down_proj.weight' has shape \[48, 80\], config.json asks for \[48, 96\]",
    ),
    "more layers in the config": (
        lambda directory: tiny_models.edit_config(directory, num_hidden_layers=4),
        r"missing tensors \(9\): 'model.layers.3",
    ),
    "fewer layers in the config": (
        lambda directory: tiny_models.edit_config(directory, num_hidden_layers=2),
        "tensor 'model.layers.2.* has no place",
    ),
    "missing tensor": (_drop(NORM), rf"missing tensors \(1\): '{NORM}'"),
    "missing part": (_drop("model.layers.1.self_attn.k_proj.weight"), "layers.1.self_attn.k_proj"),
    "leftover tensor": (_put("model.extra", torch.ones(3)), "'model.extra' has no place"),
    "leftover bias": (
        _put("model.layers.0.self_attn.q_proj.bias", torch.ones(48)),
        "q_proj.bias' has no place",
    ),
    "wrong rank": (_put(NORM, torch.ones(48, 1)), r"norm.weight' has shape \[48, 1\]"),
    "integers": (_put(NORM, torch.ones(48, dtype=torch.int64)), "is not of 16-bit"),
    "index names a path outside": (
        _index({NORM: "../model.safetensors"}),
        "not the name of a file",
    ),
    "index names no file": (_index({NORM: "gone.safetensors"}), "gone.safetensors: missing"),
    "index is wrong": (_index({"x": "model.safetensors"}), "'x' is not in model.safetensors"),
    "index is empty": (_index({}), "no 'weight_map'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_are_refused(copy, name):
    damage, message = DAMAGES[name]
    damage(copy)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(copy)
    assert "\n" not in str(caught.value)
    assert str(copy) in str(caught.value)


def test_computed_buffers_and_tied_copies_are_passed_over(tmp_path):
    tiny_models.save("llama_mqa", tmp_path)  # tied
    plain = greedy(load(tmp_path))
    _put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    _put("lm_head.weight", embedding.clone())(tmp_path)
    # KV cache scales from calibration, by either tool's names: here each row has its own.
    for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.output_scale"):
        _put(f"model.layers.1.self_attn.{name}", torch.full((1,), 3e-4))(tmp_path)
    assert greedy(load(tmp_path)) == plain


def _entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "empty": (b"", "out of range"),
    "header length 2^63": (struct.pack("<Q", 2**63) + b"{}", "out of range"),
    "header longer than the file": (struct.pack("<Q", 50) + b"{}", "out of range"),
    "not JSON": (b"{]", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not JSON"),
    "a list": (b"[]", "not an object"),
    "nested": (b"[" * 50_000, "not JSON"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, "'a' is not described"),
    "not an entry": ({"a": 3}, "'a' is not described"),
    "unknown dtype": ({"a": _entry("F8_E9")}, "'F8_E9'"),
    "dtype is a number": ({"a": _entry(7)}, "dtype 7"),
    "negative shape": ({"a": _entry(shape=(-2,))}, "malformed shape"),
    "fractional shape": ({"a": _entry(shape=(2.0,))}, "malformed shape"),
    "shape overflows": ({"a": _entry(shape=(2**62, 2**62, 4))}, "bytes for shape"),
    "many dimensions": ({"a": _entry(shape=(1,) * 99)}, "malformed shape"),
    "wrong size": ({"a": _entry(shape=(3,))}, "8 bytes for shape"),
    "reversed offsets": ({"a": _entry(offsets=(8, 0))}, "malformed offsets"),
    "cut short": ({"a": _entry(shape=(4,), offsets=(0, 16))}, "cut short"),
    "overlap": ({"a": _entry(), "b": _entry(shape=(1,), offsets=(4, 8))}, "'b' overlaps"),
    "gap": ({"a": _entry(shape=(1,), offsets=(4, 8))}, "leaves a gap"),
    "trailing bytes": ({"a": _entry(shape=(1,), offsets=(0, 4))}, "4 bytes after"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(tmp_path, name):
    header, message = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    if name.startswith(("empty", "header")):
        path.write_bytes(header)
    else:
        write(path, header, bytes(8))
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_waited_for(copy):
    (copy / "model.safetensors").unlink()
    os.mkfifo(copy / "model-1.safetensors")
    with pytest.raises(ModelLoadError, match=r"model-1.safetensors: is not a file"):
        load(copy)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_changed_file_loads_or_is_refused(tmp_path_factory, at, byte, cut):
    """No other exception, whatever byte is changed and wherever the file ends."""
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.ones(5).half()}, path)
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] = byte
    path.write_bytes(raw[: len(raw) - cut])
    try:
        header = read_header(path)
    except ModelLoadError:
        return
    with path.open("rb") as file:
        for entry in header.entries.values():
            target = torch.empty(entry.shape)
            read_into(file, entry, target)
