"""Host blocks in page-locked memory: copied correctly even if a step overwrites the source."""

from __future__ import annotations

import gc

import msgspec
import pytest
import torch

from engine.kv_cache import host_store
from engine.kv_cache.host_store import HostStore
from engine.types import BlockCopy
from tests import tiny_models
from tests.engine.runner.test_speculation import GREEDY, config_of, generate, requests_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_BLOCKS, NUM_SLOTS = 64, 40


@pytest.mark.parametrize("num_staged", [1, 5, 64])
def test_blocks_are_copied_before_the_step_overwrites_them(num_staged, monkeypatch):
    tensors = [
        torch.randint(0, 2**31, (NUM_BLOCKS, 4, 16, 64), dtype=torch.int32, device="cuda")
        for _ in range(6)
    ]
    block_bytes = sum(tensor[0].nbytes for tensor in tensors)
    monkeypatch.setattr(host_store, "STAGE_BYTES", num_staged * block_bytes)
    store = HostStore(tensors, NUM_SLOTS)
    assert store._slots.is_pinned()
    before = [tensor.clone() for tensor in tensors]
    for turn in range(20):
        offloads = [BlockCopy(slot, (slot + turn) % NUM_SLOTS) for slot in range(NUM_SLOTS)]
        store.exchange(offloads, [])
        for tensor in tensors:
            tensor[:NUM_SLOTS] = -1
        store.exchange([], [BlockCopy(slot, block) for block, slot in offloads])
    for tensor, wanted in zip(tensors, before, strict=True):
        assert torch.equal(tensor, wanted)


def test_locked_memory_is_given_back():
    tensors = [torch.zeros(4, 1024, device="cuda")]
    for _ in range(3):  # the same addresses may be locked again
        store = HostStore(tensors, 1000)
        store.exchange([BlockCopy(0, 7)], [BlockCopy(7, 1)])
        torch.cuda.synchronize()
        del store
        gc.collect()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_texts_are_those_of_a_cpu_without_a_tier(kind, eager, tmp_path):
    config = config_of(str(tiny_models.save(kind, tmp_path)), None, num_blocks=22)
    config = msgspec.structs.replace(config, device="cpu")
    expected, _, _ = generate(config, requests_of(**GREEDY))
    cache = msgspec.structs.replace(config.cache, offload_bytes=2**22)
    config = msgspec.structs.replace(config, device="cuda", cache=cache, enforce_eager=eager)
    texts, _, core = generate(config, requests_of(**GREEDY))
    assert texts == expected
    assert core.stats.tier.num_loaded > 0
