"""GGUF tables: parsed like the ``gguf`` package does; damaged and hostile ones are rejected."""

from __future__ import annotations

import contextlib
import os
import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelLoadError
from engine.gguf.file import MetadataArray, find_gguf, read_gguf
from engine.gguf.spec import read_gguf_spec
from engine.models.checkpoint import read_config
from engine.paths import default_model_dir
from engine.runner import load_runner
from engine.text.tokenizer import Tokenizer
from tests import gguf_files, tiny_models
from tests.engine.handmade import Hand, load, request


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with a tokenizer."""
    path = tmp_path_factory.mktemp("saved") / "model.gguf"
    return gguf_files.write(path, tiny_models.build("llama"), tokenizer=default_model_dir())


def greedy(path):
    hand = Hand(load(path))
    hand.add(request("a", range(10, 30)))
    return hand.decode("a", 6)


def test_tables_are_those_that_the_package_reads(saved):
    theirs, ours = gguf.GGUFReader(saved), read_gguf(saved)
    for name, field in theirs.fields.items():
        if name.startswith("GGUF."):
            continue
        value = ours.metadata[name]
        assert (
            value.values() if isinstance(value, MetadataArray) else value
        ) == field.contents(), name
    assert len(ours.metadata) == len([name for name in theirs.fields if "GGUF." not in name])
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (found.begin, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert found.type.name == tensor.tensor_type.name


def test_a_split_model_is_one_model(saved, tmp_path):
    """From any of its files, and from its directory."""
    tables = gguf.GGUFReader(saved)
    names = [tensor.name for tensor in tables.tensors]
    shares = [names[:5], names[5:9], names[9:]]
    for number, share in enumerate(shares):
        writer = gguf.GGUFWriter(tmp_path / f"m-{number + 1:05}-of-00003.gguf", "llama")
        if number == 0:
            for key, field in tables.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    kind, *inner = field.types
                    writer.add_key_value(key, field.contents(), kind, *inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in tables.tensors:
            if tensor.name in share:
                writer.add_tensor(tensor.name, np.array(tensor.data))
        gguf_files.finish(writer)
    expected = greedy(saved)
    assert greedy(tmp_path) == expected
    assert greedy(tmp_path / "m-00002-of-00003.gguf") == expected
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00003.gguf: cannot be read: No "):
        read_config(str(tmp_path))


def test_which_file_is_meant(saved, tmp_path):
    assert find_gguf(saved) == saved
    assert find_gguf(saved.parent) == saved
    blob = tmp_path / "sha256-0123"  # the naming of other tools
    blob.write_bytes(saved.read_bytes())
    assert find_gguf(blob) == blob
    assert find_gguf(default_model_dir()) is None
    assert find_gguf(tmp_path) is None
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\)"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None  # a directory in Hugging Face format


# ----------------------------------------------------------------------- rejected files


def header(num_tensors=0, num_keys=0, body=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def tensor(name="t", shape=(32,), kind=0, offset=0):
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + value


BIG = 2**62
HOSTILE = {
    "empty": (b"", "is not a GGUF file"),
    "another format": (b"PK" + bytes(60), "is not a GGUF file"),
    "version 1": (header(version=1), "has version 1; only"),
    "big-endian": (header(version=3 << 24), "of a big-endian machine"),
    "2^62 tensors": (header(num_tensors=BIG), "number of tensors is out of range"),
    "2^62 keys": (header(num_keys=BIG), "number of keys is out of range"),
    "key of 2^62 bytes": (header(num_keys=1, body=struct.pack("<Q", BIG)), "cut short"),
    "key is not UTF-8": (header(num_keys=1, body=string(b"\xff") + bytes(8)), "not UTF-8"),
    "value is not UTF-8": (header(num_keys=1, body=key("k", 8, string(b"\xff"))), "'k' is not UTF"),
    "value of no type": (header(num_keys=1, body=key("k", 13, bytes(8))), "unknown type 13"),
    "list of 2^62": (
        header(num_keys=1, body=key("k", 9, struct.pack("<IQ", 4, BIG))),
        "length of 'k' is out of range",
    ),
    "list that does not fit": (
        header(num_keys=1, body=key("k", 9, struct.pack("<IQ", 12, 20))),
        "cut short",
    ),
    "list of lists": (
        header(num_keys=1, body=key("k", 9, struct.pack("<IQ", 9, 1) + bytes(20))),
        "list of values of type 9",
    ),
    "list of strings, cut": (
        header(num_keys=1, body=key("k", 9, struct.pack("<IQ", 8, 3) + string("a"))),
        "cut short",
    ),
    "key twice": (header(num_keys=2, body=key("k", 0, b"\1") * 2), "'k' appears twice"),
    "alignment 0": (
        header(num_keys=1, body=key("general.alignment", 4, struct.pack("<I", 0))),
        "must be a power of two, not 0",
    ),
    "alignment of text": (
        header(num_keys=1, body=key("general.alignment", 8, string("x"))),
        "must be a power of two",
    ),
    "five dimensions": (header(1, body=tensor(shape=(1,) * 5)), "has 5 dimensions"),
    "type of no kind": (header(1, body=tensor(kind=4)), "has type 4, which is not supported"),
    "half a block": (header(1, body=tensor(shape=(31,), kind=2)), "which Q4_0 cannot have"),
    "shape overflows": (header(1, body=tensor(shape=(BIG, BIG))), "cut short"),
    "data is missing": (header(1, body=tensor()), "cut short"),
    "offset beyond": (header(1, body=tensor(offset=BIG)), "leaves a gap before it"),
    "overlap": (header(2, body=tensor("a") + tensor("b", offset=64)) + bytes(300), "overlaps"),
    "key with a line break": (
        header(num_keys=2, body=key("k\n\x1b[2J", 0, b"\1") * 2),
        r"key 'k\\n\\x1b\[2J' appears twice",
    ),
    "tensor twice": (header(2, body=tensor() + tensor(offset=128)) + bytes(400), "appears twice"),
    "name is not UTF-8": (header(1, body=tensor(name=b"\xff") + bytes(200)), "name is not UTF-8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_are_refused(tmp_path, name):
    raw, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"model.gguf: is not a file"):
        read_gguf(tmp_path / "model.gguf")


def _without(name):
    return lambda writer: writer.kv_data[0].pop(name)


CHANGED = {
    "architecture": (
        lambda writer: setattr(writer.kv_data[0]["general.architecture"], "value", "mamba"),
        r"architecture 'mamba' is not supported in GGUF \(known: cohere2, ",
    ),
    "type": (lambda writer: writer.add_type("adapter"), "holds a 'adapter', not a model"),
    "missing key": (_without("llama.block_count"), "'llama.block_count' must be a positive"),
    "unknown key": (
        lambda writer: writer.add_float32("llama.attention.output_scale", 2.0),
        "unsupported keys: 'llama.attention.output_scale'",
    ),
    "key for each layer": (
        lambda writer: writer.kv_data[0]["llama.attention.head_count"].__dict__.update(
            value=[6, 6, 6], type=gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT32
        ),
        "head_count' must be a positive integer below 2147483648, not a list of 3",
    ),
    "rope": (
        lambda writer: writer.add_string("llama.rope.scaling.type", "magic"),
        "'llama.rope.scaling.type' is 'magic'",
    ),
    "leftover tensor": (
        lambda writer: writer.add_tensor("blk.0.extra.weight", np.ones(3, dtype=np.float32)),
        "tensor 'blk.0.extra.weight' has no place in a llama model",
    ),
    "missing tensor": (
        lambda writer: writer.tensors[0].pop("blk.1.ffn_up.weight"),
        r"missing tensors \(1\): 'blk.1.ffn_up.weight'",
    ),
    "another shape": (
        lambda writer: writer.kv_data[0]["llama.feed_forward_length"].__dict__.update(value=96),
        r"has shape \[.*\], the metadata asks for \[",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_models_that_cannot_be_served_are_refused(tmp_path, name):
    change, message = CHANGED[name]
    path = tmp_path / "model.gguf"
    gguf_files.write(path, tiny_models.build("llama"), change=change)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_file_is_read_or_refused(saved, tmp_path, data):
    """For any changed byte of the tables and any truncation, there is no other exception."""
    raw = bytearray(saved.read_bytes())
    size = min(tensor.begin for tensor in read_gguf(saved).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        # The vocabulary is most of the tables; half of the changes are outside it.
        end = data.draw(st.sampled_from([1200, size]))
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    path = tmp_path / "changed.gguf"
    path.write_bytes(raw[:end])
    with contextlib.suppress(ModelLoadError):
        read_gguf_spec(read_gguf(path))
    with contextlib.suppress(ModelLoadError):
        Tokenizer.from_dir(path)


def test_a_file_that_shrinks_is_told_of(saved, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(saved.read_bytes())
    told = []

    def shrink(fraction, what):
        told.append(fraction)
        os.truncate(path, path.stat().st_size // 2)

    from engine.config import EngineConfig

    with pytest.raises(ModelLoadError, match=r"cut short"):
        load_runner(EngineConfig(model=str(path), num_threads=1), shrink)
    assert told
