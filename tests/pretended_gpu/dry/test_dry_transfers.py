"""Transfers between host and device are right, whichever stream runs ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kv_cache import host_store
from engine.kv_cache.host_store import HostStore
from engine.runner.transfer import Downloads, Uploads
from engine.types import BlockCopy
from kernels.sampling import SamplerOutput
from tests.pretended_gpu.stand_in import pretended_gpu
from tests.pretended_gpu.tensor import DEVICE

NUM_BLOCKS, NUM_SLOTS = 12, 9
STREAMS = pytest.mark.parametrize("eager", ["none", "main", "side"])


@STREAMS
def test_what_is_sent_arrives_whatever_is_sent_next(eager: str) -> None:
    with pretended_gpu(eager) as (gpu, _):
        uploads = Uploads(DEVICE)
        sent, wanted = [], []
        for turn in range(40):
            arrays = [np.arange(turn, dtype=np.int32), np.full((2, 3), turn, np.int32)]
            if turn == 10:
                arrays.append(np.arange(1 << 17, dtype=np.int32))  # more than the buffers hold
            if turn < 20:  # more than a step has
                with gpu.step():
                    sent.append(uploads.send(arrays))
            else:
                sent.append(uploads.send(arrays))
            wanted.append(arrays)
        for tensors, arrays in zip(sent, wanted, strict=True):
            for tensor, array in zip(tensors, arrays, strict=True):
                assert np.array_equal(tensor.cpu().numpy(), array)


@STREAMS
def test_what_is_fetched_is_of_its_own_step(eager: str) -> None:
    with pretended_gpu(eager) as (gpu, _):
        downloads, kept = Downloads(DEVICE), torch.zeros(3, device=DEVICE)
        fetched = []
        for turn in range(12):
            with gpu.step():
                downloads.guard()
                kept.fill_(turn)
                fetched.append(downloads.fetch([kept, kept * 2]))
            if turn % 3 == 2:  # read after the next steps are launched
                for nth, each in enumerate(fetched):
                    told = [tensor.tolist() for tensor in each.wait()]
                    assert told == [[turn - 2 + nth] * 3, [2 * (turn - 2 + nth)] * 3]
                fetched.clear()


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16])
def test_what_lies_together_is_fetched_together(num_rows: int) -> None:
    """A sampler's results, and not other neighbours in memory."""
    with pretended_gpu() as (gpu, _):
        downloads, sampled = Downloads(DEVICE), SamplerOutput.empty(num_rows, DEVICE)
        sampled.token_ids.copy_(torch.arange(num_rows, device=DEVICE) * 2**40)
        sampled.is_finite.copy_(torch.arange(num_rows, device=DEVICE) % 2 == 0)
        grid = torch.arange(12, device=DEVICE).view(3, 4)
        apart = [grid[1], grid[0], grid[:, 0], grid[2:], torch.arange(2, device=DEVICE)]
        with gpu.step():
            fetched = downloads.fetch([*sampled, *apart])
        token_ids, is_finite, *others = fetched.wait()
        assert token_ids.tolist() == [row * 2**40 for row in range(num_rows)]
        assert is_finite.tolist() == [row % 2 == 0 for row in range(num_rows)]
        assert is_finite.untyped_storage().data_ptr() == token_ids.untyped_storage().data_ptr()
        assert [other.tolist() for other in others] == [other.tolist() for other in apart]


@STREAMS
@pytest.mark.parametrize("num_staged", [1, 2, 99])
def test_blocks_are_copied_before_the_step_overwrites_them(
    eager: str, num_staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [torch.randint(0, 2**31, (NUM_BLOCKS, 2, 4), dtype=torch.int32) for _ in range(2)]
    monkeypatch.setattr(host_store, "STAGE_BYTES", num_staged * 2 * contents[0][0].nbytes)
    with pretended_gpu(eager) as (gpu, _):
        tensors = [each.to(DEVICE) for each in contents]
        store = HostStore(tensors, NUM_SLOTS)
        for turn in range(6):
            offloads = [BlockCopy(slot, (slot + turn) % NUM_SLOTS) for slot in range(NUM_SLOTS)]
            with gpu.step():
                store.exchange(offloads, [])
                for tensor in tensors:
                    tensor[:NUM_SLOTS] = -1
                store.exchange([], [BlockCopy(slot, block) for block, slot in offloads])
        for tensor, wanted in zip(tensors, contents, strict=True):
            assert torch.equal(tensor.cpu(), wanted)
