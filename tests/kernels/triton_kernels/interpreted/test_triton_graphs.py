"""The graph of a number of tokens has room for every step that it is to serve."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runner.captured_batches import MAX_CHUNKS, pad_prompt, padded_rows, prompt_bounds
from engine.runner.inputs import HostBatch
from kernels.attention import AttentionSpec, BatchGeometry
from kernels.triton.backend import TritonAttention


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_size_serves_every_step_that_has_no_more_tokens_and_few_chunks(data) -> None:
    """Whatever its rows are: what the plan of a graph has room for suffices."""
    size = data.draw(st.sampled_from([16, 64, 192]), "tokens")
    most = data.draw(st.sampled_from([1, 3, 15, 60, size - 2]), "rows")
    num_rows, num_slots = padded_rows(size, most), 2**18
    most_chunks = min(MAX_CHUNKS - 1, most, size // 2)
    lengths = data.draw(st.lists(st.integers(2, size), max_size=most_chunks), "chunks")
    most_texts = min(most, size - len(lengths)) - len(lengths)
    lengths += [1] * data.draw(st.integers(0 if lengths else 1, most_texts), "texts")
    lengths = data.draw(st.permutations(lengths))
    while sum(lengths) > size:
        lengths[lengths.index(max(lengths))] -= 1
    longest = num_slots // 2 // len(lengths)
    batch = HostBatch(
        slots=np.arange(len(lengths), dtype=np.int32),
        query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        starts=np.array([data.draw(st.integers(0, longest - size)) for _ in lengths], np.int32),
        token_ids=np.arange(sum(lengths), dtype=np.int32),
        sampling_rows=np.arange(len(lengths), dtype=np.int32),
    )
    padded = pad_prompt(batch, num_rows, size, 99)
    assert padded.query_start[-1] == size
    assert (padded.positions[sum(lengths) :] < 0).all(), "padding is stored nowhere"
    assert (padded.seq_lens[len(lengths) :] == 0).all()
    assert (padded.positions[: sum(lengths)] == batch.positions).all()

    bounding, tables = prompt_bounds(size, num_rows, num_slots, 99), np.zeros((1, 1), np.int32)
    bounds, actual = (
        BatchGeometry.of(each.query_start, each.seq_lens, tables, torch.device("cpu"))
        for each in (bounding, padded)
    )
    for num_heads in (1, 2, 5, 16):
        spec = AttentionSpec(num_heads, 1, 64, 16, torch.float32, torch.device("cpu"))
        for backend in (TritonAttention(), TritonAttention(invariant=True)):
            assert backend.can_replay(bounds, actual, spec)
