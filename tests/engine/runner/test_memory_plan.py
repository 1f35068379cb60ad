"""The number of blocks and the context length, from the settings and the free memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import ModelLoadError
from engine.kv_cache import sizing, storage
from engine.kv_cache.step_memory import step_bytes
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec
from engine.paths import default_model_dir
from engine.runner.device import default_threads, set_threads
from engine.runner.load import load_runner

MIB = 2**20
GIB = 2**30
SPEC = DecoderSpec(
    architecture="llama",
    vocab_size=1000,
    hidden_size=1024,
    intermediate_size=2048,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=8192,
    norm=NormSpec(1e-5),
    rope=RopeSpec(1e4),
    layers=(LayerSpec(),) * 8,
)
A_TOKEN = 2 * 8 * 4 * 64 * 4  # 16 KiB in float32


@pytest.fixture
def free(monkeypatch):
    def set_to(size):
        monkeypatch.setattr(sizing, "available_bytes", lambda _device: size)

    return set_to


def plan(cache=CacheConfig(), max_num_seqs=256, max_model_len=None, **changes):  # noqa: B008 frozen
    return sizing.plan_memory(
        SPEC,
        cache,
        SchedulerConfig(max_num_seqs=max_num_seqs),
        block_size=cache.block_size or 16,
        max_model_len=max_model_len,
        weights_bytes=GIB,
        **{"dtype": torch.float32, "device": torch.device("cpu"), **changes},
    )


def test_a_modest_share_by_default(free):
    free(400 * GIB)
    # Small, but one sequence of full length fits.
    assert plan().kv_cache_bytes == max(512 * MIB, 8192 * A_TOKEN)
    assert plan(max_model_len=16).kv_cache_bytes == 256 * 16 * A_TOKEN
    free(GIB)
    assert plan().kv_cache_bytes == 256 * MIB
    assert plan().free_bytes == 768 * MIB


def test_prefixes_keep_little_of_what_nobody_asked_for_and_all_of_what_was_asked_for(free):
    free(400 * GIB)
    # One text of full length for a possible continuation, or a little if texts are short.
    assert plan().max_idle_blocks == 8192 // 16
    assert plan(max_model_len=1024, max_num_seqs=64).max_idle_blocks == 64 * MIB // (16 * A_TOKEN)
    assert plan(CacheConfig(memory_bytes=GIB)).max_idle_blocks is None
    assert plan(CacheConfig(num_blocks=7)).max_idle_blocks is None


def test_what_is_asked_for_is_what_there_is(free):
    free(8 * GIB)
    assert plan(CacheConfig(memory_bytes=GIB, block_size=8)).num_blocks == GIB // (8 * A_TOKEN)
    assert plan(CacheConfig(num_blocks=7)).kv_cache_bytes == 7 * 16 * A_TOKEN
    too_large = "kv_cache_memory_bytes: the KV cache takes 9,216 MiB, 8,192 MiB are free"
    with pytest.raises(ModelLoadError, match=too_large):
        plan(CacheConfig(memory_bytes=9 * GIB))
    with pytest.raises(ModelLoadError, match="num_gpu_blocks_override: the KV cache takes"):
        plan(CacheConfig(num_blocks=10**9))
    with pytest.raises(ModelLoadError, match="is too little: one block of 16 tokens takes"):
        plan(CacheConfig(memory_bytes=A_TOKEN))
    free(0)
    with pytest.raises(ModelLoadError, match="no memory for the KV cache"):
        plan()


def test_the_context_is_cut_to_what_the_cache_holds_unless_it_is_asked_for(free):
    free(8 * GIB)
    small = CacheConfig(num_blocks=10)
    assert plan().max_model_len == 8192
    assert plan(small).max_model_len == 160
    assert plan(small, max_model_len=1000).max_model_len == 1000  # only prompts are rejected
    with pytest.raises(ModelLoadError, match="context is 8,192 tokens"):
        plan(max_model_len=8193)


def test_the_plan_is_told_in_one_line(free):
    free(8 * GIB)
    line = plan().describe()
    assert "weights 1024 MiB, KV cache 512 MiB = 2,048 blocks" in line
    assert "longest context 8,192 tokens" in line


def test_free_memory_is_told():
    assert 0 < sizing.available_bytes(torch.device("cpu")) < 2**50


def test_a_small_model_leaves_a_core_to_the_http_process():
    assert [default_threads(cores, 20 * 2**20) for cores in (1, 2, 8)] == [1, 1, 7]
    assert [default_threads(cores, GIB) for cores in (1, 2, 8)] == [1, 2, 8]


def test_kernels_that_wait_for_nobody_have_all_cores():
    before = torch.get_num_threads()
    cores = min(before, set_threads(None, GIB))
    assert set_threads(None, 20 * 2**20, shares_cores=True) == cores
    assert set_threads(1, 20 * 2**20, shares_cores=True) == 1
    torch.set_num_threads(before)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_codes_make_nearly_twice_the_blocks_of_the_same_memory(free, codes):
    """A head of 64 takes 64 bytes and 4 of scale instead of 128."""
    free(8 * GIB)
    cache = CacheConfig(memory_bytes=GIB)
    wide, coded = (plan(cache, dtype=torch.bfloat16, codes=c) for c in (None, codes))
    assert coded.bytes_per_token == 2 * 8 * 4 * (64 + 4)
    assert coded.num_blocks == GIB // (16 * coded.bytes_per_token)
    assert coded.num_blocks / wide.num_blocks == pytest.approx(128 / 68, rel=1e-3)
    assert wide.cache_dtype == "bfloat16"
    assert f"bytes a token in {str(codes).removeprefix('torch.')})" in coded.describe()
    store = storage.KVCache(SPEC, 3, 16, torch.bfloat16, torch.device("cpu"), codes)
    held = sum(part.nbytes for layer in store.layers for part in layer.tensors())
    assert held == 3 * 16 * coded.bytes_per_token


def test_a_gpus_cache_leaves_room_for_widened_weights(free, monkeypatch):
    """Twice: captured steps have a copy of their own. A layer's largest matrix, or a part of it."""
    free(8 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (8 * GIB, 10 * GIB))
    dense, coded = (
        plan(device=torch.device("cuda"), dtype=torch.bfloat16, max_num_seqs=10**4, has_codes=codes)
        for codes in (False, True)
    )
    lost = dense.kv_cache_bytes - coded.kv_cache_bytes
    assert lost == pytest.approx(2 * 2 * (2 * 2048) * 1024, abs=16 * dense.bytes_per_token)
    limits = SchedulerConfig().for_device("cuda")
    experts = replace(SPEC, moe=MoeSpec(128, 4, 2880, normalised=True), hidden_size=2880)
    sizes = [step_bytes(experts, limits, torch.bfloat16, has_codes=each) for each in (False, True)]
    assert sizes[1] - sizes[0] == 2 * 512 * MIB


def on_gpu(free, monkeypatch, left, share, own=0):
    """The cache on a GPU of 80 GiB of which so much is free, and so much is this engine's."""
    free(left * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (left * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: own * GIB)
    cache = CacheConfig(memory_utilization=share)
    device = torch.device("cuda")
    return plan(cache, device=device, dtype=torch.bfloat16, max_num_seqs=10**4).kv_cache_bytes


def test_engines_that_share_a_gpu_have_their_shares_of_it(free, monkeypatch):
    """Each of two has 10 GiB of weights, and the second finds the first one's 36 GiB."""
    first = on_gpu(free, monkeypatch, 80 - 10, 0.45, own=10)
    second = on_gpu(free, monkeypatch, 80 - 36 - 10, 0.45, own=10)
    assert 24 * GIB < first <= 26 * GIB
    assert first - GIB <= second <= first, "less what a process has beside its tensors"


def test_who_shares_a_gpu_with_others_leaves_them_a_tenth_of_it(free, monkeypatch):
    alone, beside = (on_gpu(free, monkeypatch, left, 0.9, own=10) for left in (70, 30))
    assert alone - beside == pytest.approx(40 * GIB, abs=16 * A_TOKEN)
    assert on_gpu(free, monkeypatch, 30, 0.5, own=10) <= 22 * GIB


def test_what_a_gpu_is_kept_free_for_is_told_if_no_block_fits(free, monkeypatch):
    told = (
        r"one block takes 0.1 MiB, 7,168 MiB are free beside the weights, of which [\d,]+ are for "
        r"steps \(.*--max-num-seqs.*\) and 8,192 are left free \(--gpu-memory-utilization\)$"
    )
    with pytest.raises(ModelLoadError, match=told):
        on_gpu(free, monkeypatch, 7, 0.9)


def test_rows_of_a_tokens_experts_are_counted():
    """GPT-OSS's first products of 8,192 tokens alone take 360 MiB; captured steps have 2,048."""
    limits = SchedulerConfig(max_num_batched_tokens=8192)
    experts = replace(SPEC, moe=MoeSpec(32, 4, 2880, normalised=True), hidden_size=2880)
    counted = step_bytes(experts, limits, torch.bfloat16, has_codes=False)
    without = step_bytes(replace(experts, moe=None), limits, torch.bfloat16, has_codes=False)
    assert counted - without == (8192 + 2048) * 4 * (3 + 1) * 2880 * 2 == 2 * 450 * MIB


def test_a_context_that_the_model_lacks_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """There are none here."""
    shutil.copy(default_model_dir() / "config.json", tmp_path)
    told = r"^max_model_len 1,000,000 is out of range: this model's context is 4,096 tokens$"
    with pytest.raises(ModelLoadError, match=told):
        load_runner(EngineConfig(model=str(tmp_path), max_model_len=10**6))
