"""Embeddings with the openai SDK, and a rerank, for which the SDK has no method."""

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
    answer = client.embeddings.create(model=model, input=["One text", "Another"], dimensions=64)
    for entry in answer.data:
        print(entry.index, len(entry.embedding), entry.embedding[:3])

    body = {"model": model, "query": "capital of France", "documents": ["Bread", "Paris"]}
    ranked = client.post("/rerank", body=body, cast_to=object)
    print(ranked)
