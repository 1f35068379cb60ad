"""What FlashInfer is told of a batch, without FlashInfer."""

from __future__ import annotations

import numpy as np
import torch

from kernels.attention import BatchGeometry, LayerCache
from kernels.bench.flashinfer_peer import _pages, flashinfer_attention

CPU = torch.device("cpu")


def test_pages_are_the_blocks_in_use() -> None:
    """Rows of a part of a block, of whole blocks, and of one token more."""
    tables = np.array([[7, 0, 0], [3, 5, 0], [1, 2, 8]])
    geometry = BatchGeometry.of(np.array([0, 1, 2, 3]), np.array([5, 64, 65]), tables, CPU)
    starts, blocks, last = _pages(geometry, block_size=32)
    assert starts.tolist() == [0, 1, 3, 6]
    assert blocks.tolist() == [7, 3, 5, 1, 2, 8]
    assert last.tolist() == [5, 32, 1]
    assert {each.dtype for each in (starts, blocks, last)} == {torch.int32}


def test_it_is_no_peer_on_a_cpu() -> None:
    geometry = BatchGeometry.of(np.array([0, 1]), np.array([1]), np.array([[0]]), CPU)
    cache = LayerCache(torch.zeros(1, 2, 16, 64), torch.zeros(1, 2, 16, 64))
    assert flashinfer_attention(geometry, torch.zeros(1, 4, 64), cache, 1.0) is None
