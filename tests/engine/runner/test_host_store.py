"""Blocks in host memory: copies in both directions, and texts of engines that depend on them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.kv_cache import host_store
from engine.kv_cache.host_store import HostStore
from engine.kv_cache.storage import KVCache
from engine.requests import fan_out
from engine.speculation.draft_length import DraftLengthController
from engine.speculation.read_blocks import ReadBlocks
from engine.types import BlockCopy, SamplingParams
from tests import tiny_draft_heads, tiny_models
from tests.engine.runner.test_memory_plan import SPEC
from tests.engine.runner.test_speculation import (
    GREEDY,
    config_of,
    generate,
    requests_of,
    speculation_of,
)
from tests.engine.speculation.test_draft_head import saved

PLENTY = 2**22  # bytes: enough for everything that these tests compute
CPU = torch.device("cpu")


# ---------------------------------------------------------------- copies


def tensors_of(kind: str) -> list[torch.Tensor]:
    """Twelve random blocks."""
    if kind == "odd":
        return [torch.randint(0, 255, (12, n), dtype=torch.uint8) for n in (3, 8)]
    codes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    cache = KVCache(SPEC, 12, 4, dtype, CPU, codes)
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors()]
    for tensor in tensors:
        tensor.view(torch.uint8).random_()
    return tensors


def bytes_of(tensors: list[torch.Tensor], block: int) -> list[list[int]]:
    return [tensor[block].contiguous().view(torch.uint8).flatten().tolist() for tensor in tensors]


@pytest.mark.parametrize("stage_bytes", [0, 2**25], ids=["a block at once", "all at once"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "fp8", "odd"])
def test_blocks_come_back_to_other_places_bit_by_bit(kind, stage_bytes, monkeypatch):
    monkeypatch.setattr(host_store, "STAGE_BYTES", stage_bytes)
    tensors = tensors_of(kind)
    store = HostStore(tensors, 7)
    assert store.num_bytes == 7 * sum(tensor[0].nbytes for tensor in tensors)
    before = {block: bytes_of(tensors, block) for block in range(12)}
    store.exchange([BlockCopy(3, 6), BlockCopy(0, 1), BlockCopy(11, 0)], [])
    for tensor in tensors:
        tensor.view(torch.uint8)[[3, 0, 11]] = 0
    # A step may load what it offloads, even into the block that it has offloaded.
    store.exchange([BlockCopy(5, 2)], [BlockCopy(0, 5), BlockCopy(2, 3), BlockCopy(6, 0)])
    after = {block: bytes_of(tensors, block) for block in range(12)}
    assert (after[5], after[3], after[0]) == (before[11], before[5], before[3])
    untouched = set(range(12)) - {0, 3, 5, 11}
    assert all(after[block] == before[block] for block in untouched)


def test_memory_that_there_is_not_is_told_in_one_line():
    with pytest.raises(ModelLoadError, match="there is not so much") as told:
        HostStore([torch.zeros(2, 2**20)], 2**40)
    assert "\n" not in str(told.value)


def test_a_drafts_books_go_with_the_blocks():
    books = ReadBlocks(6, 4)
    table = torch.tensor([4, 2]).numpy()
    books.record(table, 0, 7)
    books.exchange([BlockCopy(2, 0), BlockCopy(4, 1)], [])
    books.reset([2, 4])
    assert books.num_read(table, 8) == 0
    books.exchange([BlockCopy(2, 5)], [BlockCopy(1, 2), BlockCopy(0, 3), BlockCopy(5, 1)])
    assert books.num_read(torch.tensor([2, 3]).numpy(), 8) == 7
    assert books.num_read(torch.tensor([1]).numpy(), 4) == 0
    books.copy([BlockCopy(2, 0), BlockCopy(3, 1)], {0: 2, 1: 3})
    assert books.num_read(torch.tensor([0]).numpy(), 4) == 2
    assert books.num_read(torch.tensor([1]).numpy(), 4) == 3


# ---------------------------------------------------------------- texts


def offloaded(config: EngineConfig, num_bytes: int = PLENTY) -> EngineConfig:
    """The same config with a host tier."""
    cache = msgspec.structs.replace(config.cache, offload_bytes=num_bytes)
    return msgspec.structs.replace(config, cache=cache)


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_blocks": 22},  # a window in every layer
    "gemma2": {},  # and in some layers
    "deepseek_v3": {},  # latents
    "deepseek_v32": {},  # and index keys
    "qwen3": {"dtype": "int8"},
    "smollm": {"dtype": "fp8"},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made: dict[str, str] = {}

    def directory(kind: str) -> str:
        if kind not in made:
            made[kind] = str(tiny_models.save(kind, tmp_path_factory.mktemp(kind)))
        return made[kind]

    return directory


@pytest.mark.parametrize("overlap", [False, True], ids=["stepwise", "overlapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_texts_are_the_same_and_hardly_computed_again(kind, overlap, directories):
    few = config_of(directories(kind), None, max_step_passes=1, overlap=overlap)
    cache = msgspec.structs.replace(few.cache, **{"num_blocks": 30, **KINDS[kind]})
    few = msgspec.structs.replace(few, cache=cache)
    many = msgspec.structs.replace(few, cache=msgspec.structs.replace(few.cache, num_blocks=200))
    requests = requests_of(**GREEDY)
    expected, _, core = generate(many, requests)
    assert core.stats.num_preemptions == 0
    texts, _, without = generate(few, requests)
    assert texts == expected
    texts, _, core = generate(offloaded(few), requests)
    assert texts == expected
    stats = core.stats
    assert stats.tier.num_loaded > 0
    assert core.check() == []
    # Per preemption, only the last, partial block and at most one more in flight.
    assert stats.num_recomputed <= stats.num_preemptions * 2 * 4 < without.stats.num_recomputed
    texts, _, core = generate(offloaded(few, 40_000), requests)  # some of it is evicted
    assert texts == expected


def test_a_prefix_that_others_have_driven_out_is_found_again(directories):
    config = offloaded(config_of(directories("llama"), None, num_blocks=30, max_step_passes=1))
    core = EngineCore.load(config)
    rng = random.Random(2)
    stem = [rng.randrange(3, 160) for _ in range(80)]
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)

    def ask(name: str, prompt: list[int], salt: str = "") -> tuple[list[int], int]:
        (request,) = fan_out(name, prompt, sampling, cache_salt=salt)
        core.add(request)
        tokens, num_cached = [], 0
        while core.has_work:
            output = core.step()
            tokens += [token for ids in output.token_ids for token in ids]
            num_cached += output.num_cached_tokens.get(name, 0)
        return tokens, num_cached

    text, num_cached = ask("first", [*stem, 7])
    assert num_cached == 0
    for index in range(3):
        ask(f"other {index}", [rng.randrange(3, 160) for _ in range(90)])
    assert core.stats.tier.num_hits == 0
    assert ask("again", [*stem, 7]) == (text, 80)
    stats = core.stats
    assert (stats.tier.num_hits, stats.tier.num_loaded, stats.prefix_cache_hits) == (80, 20, 80)
    assert stats.tier.num_queries == stats.prefix_cache_queries == 81 + 3 * 90 + 81
    _, num_cached = ask("another tenant's", [*stem, 7], salt="tenant")
    assert num_cached == 0
    # Concurrent requests with the same prefix share the blocks that the first one loads.
    for index in range(3):
        ask(f"another {index}", [rng.randrange(3, 160) for _ in range(90)])
    for index in range(4):
        core.add(fan_out(f"many {index}", [*stem, 8 + index], sampling)[0])
    output = core.step()
    assert output.stats.num_running == 4
    assert output.stats.blocks.shared == 20
    assert output.stats.tier.num_loaded == stats.tier.num_loaded + 20


@pytest.mark.parametrize("how", ["whole", "chunks", "overlapped"])
def test_a_draft_model_finds_what_it_had_read(how, directories, monkeypatch):
    """The model as its own draft is always right, if it has read all of the text."""
    rng = random.Random(3)
    monkeypatch.setattr(
        DraftLengthController, "take_drafts", lambda pace, *_: rng.choice((0, 0, 0, 1, 3))
    )
    tiny = directories("llama")
    schedule = {"chunks": {"max_num_batched_tokens": 7}, "overlapped": {"overlap": True}}
    config = config_of(
        tiny, speculation_of("itself", tiny, tiny), num_blocks=30, **schedule.get(how, {})
    )
    requests = requests_of(**GREEDY)
    expected, _, _ = generate(config_of(tiny, None), requests)
    texts, _, core = generate(offloaded(config), requests)
    assert texts == expected
    drafts = core.stats.drafts
    assert drafts.num_accepted_tokens == drafts.num_draft_tokens > 10
    assert core.stats.tier.num_loaded > 0


def test_each_rank_has_its_part_of_what_is_offloaded(directories):
    config = config_of(directories("llama"), None, num_blocks=30, max_step_passes=1)
    requests = requests_of(**GREEDY)
    expected, _, alone = generate(offloaded(config), requests)
    config = msgspec.structs.replace(config, tensor_parallel_size=2)
    texts, _, core = generate(offloaded(config), requests)
    assert texts == expected
    assert core.stats.tier == alone.stats.tier
    assert core.stats.tier.num_loaded > 0
    assert core.info.memory.host_bytes * 2 == alone.info.memory.host_bytes


def test_what_a_head_reads_of_its_model_comes_back(tmp_path, monkeypatch):
    """Texts whose prefixes come from the host are drafted as well as those that are computed."""
    twin = tiny_draft_heads.build("eagle3", tiny_models.build("llama"))
    model, _ = saved(twin, tmp_path)
    requests = requests_of(**GREEDY)
    greedy, _, _ = generate(config_of(model, None), requests)
    prompts = [[*request.prompt_token_ids] for request in requests]
    texts = [[*prompt, *greedy[str(at)]] for at, prompt in enumerate(prompts)]
    twin.learn(texts, [len(prompt) for prompt in prompts], steps=120)
    config = config_of(*saved(twin, tmp_path), num_blocks=30, max_step_passes=1)

    def kept() -> float:
        core = EngineCore.load(offloaded(config))
        for wave in range(2):
            for request in requests:
                core.add(msgspec.structs.replace(request, id=f"{wave}-{request.id}"))
            while core.has_work:
                output = core.step()
                for id_, tokens in zip(output.ids, output.token_ids, strict=True):
                    told.setdefault(id_, []).extend(tokens)
        assert core.stats.tier.num_loaded > 20
        drafts = core.stats.drafts
        return drafts.accepted_per_position[0] / drafts.num_drafts

    told: dict[str, list[int]] = {}
    assert kept() > 0.5
    assert all(told[id_] == greedy[id_.partition("-")[2]] for id_ in told)


# ---------------------------------------------------------------- rejected settings


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        ({"enable_prefix_caching": False, "offload_bytes": 2**20}, "prefix cache, which is off"),
        ({"offload_bytes": 100}, "100 bytes do not hold a block, which takes"),
        ({"offload_bytes": 2**60}, "of host memory are free"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(cache, told, directories):
    config = config_of(directories("llama"), None)
    cache = CacheConfig(block_size=4, num_blocks=8, **cache)
    with pytest.raises(ModelLoadError, match=f"^kv_offload_bytes: .*{told}"):
        EngineCore.load(msgspec.structs.replace(config, cache=cache))


def test_the_start_line_names_the_tier(directories):
    memory = EngineCore.load(offloaded(config_of(directories("llama"), None))).info.memory
    block_bytes = memory.bytes_per_token * memory.block_size
    assert memory.num_host_blocks == PLENTY // block_bytes
    assert memory.host_bytes == memory.num_host_blocks * block_bytes
    assert f"{memory.num_host_blocks:,} more blocks in 4 MiB of the host's memory" in (
        memory.describe()
    )
