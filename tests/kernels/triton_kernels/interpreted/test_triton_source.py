"""Attention to a source and to the text behind it, by Triton's kernels."""

from __future__ import annotations

import pytest

from tests.kernels.source_cases import BATCHES, check_attention, check_places


@pytest.mark.parametrize("rows", BATCHES)
def test_texts_attend_to_source_and_text(rows: tuple[tuple[int, int], ...]) -> None:
    check_attention("triton", rows)


def test_places_are_counted_from_a_later_one() -> None:
    check_places("triton")
