"""Print an answer as it is generated."""

import sys

from engine import LLM, SamplingParams

messages = [{"role": "user", "content": "Tell me a short story about a cat."}]

with LLM(*sys.argv[1:]) as llm:
    for delta in llm.stream_chat(messages, SamplingParams(temperature=0.7, seed=1, max_tokens=80)):
        print(delta.text, end="", flush=True)
        if delta.finished:
            print(f"\n[{delta.finish_reason}]")

    # A stream can be left at any time; its blocks are freed at once.
    with llm.stream("Once upon a time", SamplingParams(max_tokens=80)) as stream:
        print(next(stream).text)
