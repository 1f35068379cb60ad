"""Attention to a source and to the text behind it equals that over plain tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels.source_cases import BATCHES, check_attention, check_places, kernels_of


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("rows", BATCHES)
def test_texts_attend_to_source_and_text(name: str, rows: tuple[tuple[int, int], ...]) -> None:
    check_attention(name, rows)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_places_are_counted_from_a_later_one(name: str) -> None:
    check_places(name)


def test_a_source_is_made_of_whole_blocks() -> None:
    kernels, spec = kernels_of("reference")
    assert "not made of blocks of 24" in str(kernels.attention.refuse(replace(spec, block_size=24)))
