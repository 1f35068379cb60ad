"""Query a running server with the openai SDK."""

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
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    print(choice.message.content)
    print(f"{choice.finish_reason}, {answer.usage and answer.usage.completion_tokens} tokens")
    for entry in (choice.logprobs and choice.logprobs.content) or ():
        print(f"  {entry.token!r:12} {entry.logprob:.3f}")
