"""A model cloned with git alone: what was not downloaded is told as that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ModelLoadError
from engine.gguf.file import read_gguf
from engine.models.safetensors import read_header
from engine.text.tokenizer import Tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


def load_tokenizer(path: Path) -> None:
    Tokenizer.from_dir(path.parent)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", read_header),
        ("model.gguf", read_gguf),
        ("tokenizer.json", load_tokenizer),
    ],
)
def test_a_pointer_in_place_of_a_file_is_named(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    path.write_text(POINTER)
    with pytest.raises(ModelLoadError, match=rf"{name}: is a pointer of Git LFS.*git lfs pull"):
        read(path)
