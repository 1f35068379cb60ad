"""Stream an answer from a running server with the openai SDK."""

import os
import sys

from openai import APIConnectionError, OpenAI

base_url = os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000/v1"
if len(sys.argv) > 1:
    base_url = sys.argv[1]

with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"no server answers at {base_url}; start one with: quire serve")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a short story about a cat."}],
        temperature=0.7,
        seed=1,
        max_completion_tokens=80,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")
