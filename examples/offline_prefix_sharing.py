"""Prompts with a common prefix share its KV blocks and do not compute it again."""

import sys

from engine import LLM, SamplingParams

system = "You are a helpful assistant who answers questions about the planets. " * 8
questions = [
    "Which planet is the largest?",
    "What is the third planet from the Sun?",
    "What is the fourth planet from the Sun?",
]
params = SamplingParams(temperature=0.0, max_tokens=24)

with LLM(*sys.argv[1:]) as llm:
    for question in questions:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        (result,) = llm.chat(messages, params)
        total, cached = len(result.prompt_token_ids), result.num_cached_tokens
        print(f"{result.outputs[0].text}  [{cached} of {total} prompt tokens from the cache]")

    stats = llm.stats()
    engine, blocks = stats.engine, stats.engine.blocks
    print(f"found {engine.prefix_cache_hits} of {engine.prefix_cache_queries} prompt tokens")
    print(f"{blocks.total} KV blocks: {blocks.free} free, {blocks.cached} hold a reusable prefix")
    print(stats.memory.describe())
    print(f"device: {stats.device.used_bytes / 2**20:.0f} MiB used")
