"""PyTorch's own checkpoints: read on request, like safetensors, and never executed."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ModelLoadError
from tests import tiny_models
from tests.engine.handmade import Hand, load, request


def greedy(directory, **changes):
    hand = Hand(load(directory, **changes))
    hand.add(request("a", range(10, 30)))
    return hand.decode("a", 6)


@pytest.fixture
def directory(tmp_path):
    """A model with its weights both as safetensors and as a pickle."""
    tiny_models.save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.save({name: tensor.clone() for name, tensor in tensors.items()}, bin_of(tmp_path))
    return tmp_path


def bin_of(directory):
    return directory / "pytorch_model.bin"


def test_they_answer_as_safetensors_do(directory):
    expected = greedy(directory)
    (directory / "model.safetensors").unlink()
    assert greedy(directory, load_format="bin") == expected


def test_shards_go_by_their_index(directory):
    expected = greedy(directory)
    tensors = torch.load(bin_of(directory), weights_only=True)
    names = sorted(tensors)
    mapping = {}
    for number, share in enumerate((names[:9], names[9:])):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in share}, directory / file)
        mapping |= dict.fromkeys(share, file)
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": mapping}))
    bin_of(directory).unlink()
    assert greedy(directory, load_format="bin") == expected
    index.write_text(json.dumps({"weight_map": {**mapping, "x": "../" + file}}))
    with pytest.raises(ModelLoadError, match="is not the name of a file beside it"):
        load(directory, load_format="bin")


def test_they_are_not_read_unless_asked_for(directory):
    assert greedy(directory)  # safetensors take precedence
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"as pickles only .* --load-format bin"):
        load(directory)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def strided(path):
    tensors = torch.load(path, weights_only=True)
    name = "model.layers.0.mlp.up_proj.weight"
    torch.save({**tensors, name: tensors[name].T.contiguous().T}, path)


def rezipped(path, compression, change=lambda name, data: data):
    """The same archive, rewritten."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))


def pickled(data):
    """The archive with another pickle in it."""

    def replace(path):
        change = lambda name, old: data if name.endswith(".pkl") else old  # noqa: E731
        rezipped(path, zipfile.ZIP_STORED, change)

    return replace


DEEP = b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b"."
# Hashing tuples nested this deep crashes the process.
DEEP_KEY = b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s."
KEPT_KEY = b"\x80\x02})" + b"q\x00h\x00\x86" * 300_000 + b"K\x01s."
BIG = b"\x80\x02" + b"N0" * (5 * 2**20) + b"}."
BAD = {
    "compressed": (lambda path: rezipped(path, zipfile.ZIP_DEFLATED), "is compressed"),
    "a large pickle": (pickled(BIG), "its table takes 10 MB"),
    "nested": (pickled(DEEP), "more than 100 nested tuples"),
    "a nested key": (pickled(DEEP_KEY), "more than 100 nested tuples"),
    "a nested key from the memo": (pickled(KEPT_KEY), "more than 100 nested tuples"),
    "a tuple for a name": (
        pickled(b"\x80\x02})\x85K\x01s."),
        "a key of type tuple is not a tensor",
    ),
    "a long string": (pickled(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f."), "more than tensors"),
    "another global": (
        pickled(b"\x80\x02cposix\nsystem\nX\x02\0\0\0id\x85R."),
        "more than tensors",
    ),
    "torch's own code": (pickled(b"\x80\x02ctorch.hub\nload\n)R."), "more than tensors"),
    "no opcodes": (pickled(b"\xff" * 99), "more than tensors"),
    "code": (lambda path: torch.save({"a": Evil(path.parent / "made")}, path), "more than tensors"),
    "plain pickle": (
        lambda path: path.write_bytes(pickle.dumps({"a": Evil(path.parent / "made")}, 2)),
        "not in PyTorch's format of 2020 and later",
    ),
    "old format": (
        lambda path: torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False),
        "not in PyTorch's format of 2020 and later",
    ),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:5000]), "2020 and later"),
    "no tensors": (lambda path: torch.save({"a": 3}, path), "'a' is not a tensor by name"),
    "a list": (lambda path: torch.save([torch.ones(2)], path), "does not hold tensors by name"),
    "strided": (strided, "up_proj.weight' does not lie in one piece"),
    "missing": (lambda path: path.unlink(), "is not a file"),
    "damaged": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"torch", b"torcx")),
        "pytorch_model.bin: ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_tensors_is_refused(directory, name):
    damage, message = BAD[name]
    damage(bin_of(directory))
    with warnings.catch_warnings(), pytest.raises(ModelLoadError, match=message) as caught:
        load(directory, load_format="bin")
    assert "\n" not in str(caught.value)
    assert str(bin_of(directory)) in str(caught.value)
    assert not (directory / "made").exists()
