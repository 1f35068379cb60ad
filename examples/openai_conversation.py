"""A conversation stored on the server: each response continues it and adds to it."""

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
    conversation = client.conversations.create(metadata={"about": "capitals"})
    for question in ("What is the capital of France?", "What is the capital of Italy?"):
        client.responses.create(
            model=model, input=question, conversation=conversation.id, temperature=0
        )
    for item in client.conversations.items.list(conversation.id, order="asc"):
        print(f"{item.role}: {item.content[0].text}")
    client.conversations.delete(conversation.id)
