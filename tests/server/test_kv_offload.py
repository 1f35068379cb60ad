"""Prefixes that are loaded back from host memory, over HTTP."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.servers import Server, running_server


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose cache holds one long prompt."""
    log = tmp_path_factory.mktemp("offload") / "server.log"
    flags = ("--num-gpu-blocks-override", "64", "--kv-offload-bytes", "64MiB")
    with running_server(log, *flags) as running:
        yield running


def test_a_prompt_that_others_have_driven_out_is_cached_still(small_server: Server) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(300, 3000) for _ in range(700)] for _ in range(3)]
    cached, texts = [], []
    for prompt in (*prompts, prompts[0]):
        answer = small_server.complete(prompt, max_tokens=4).json()
        texts.append(answer["choices"][0]["text"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 0, 688]
    assert texts[3] == texts[0]
    metrics = small_server.metrics()
    assert metrics["external_prefix_cache_hits_total"] == 688
    assert metrics["prefix_cache_hits_total"] == 688
    assert metrics["external_prefix_cache_queries_total"] == 2800
    assert metrics["kv_blocks_loaded_total"] == 43
    num_offloaded = metrics["kv_blocks_offloaded_total"]
    assert 43 <= num_offloaded == metrics["kv_offload_blocks_used"]
    assert num_offloaded <= metrics["kv_offload_blocks_total"]
    assert metrics["kv_offload_bytes_used"] % num_offloaded == 0
    assert "more blocks in 64 MiB of the host's memory" in small_server.log.read_text()


def test_without_a_tier_nothing_is_said_of_one(server: Server) -> None:
    assert not any(name.startswith("kv_offload") for name in server.metrics())
