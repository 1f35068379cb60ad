"""Send a batch with the openai SDK: a file of requests, processed while the server is idle."""

import json
import os
import sys
import time

from openai import APIConnectionError, OpenAI

base_url = os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000/v1"
if len(sys.argv) > 1:
    base_url = sys.argv[1]
COUNTRIES = ("France", "Italy", "Spain")

with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"no server answers at {base_url}; start one with: quire serve")
    lines = [
        {
            "custom_id": country,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"What is the capital of {country}?"}],
                "temperature": 0,
            },
        }
        for country in COUNTRIES
    ]
    text = "\n".join(map(json.dumps, lines))
    file = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    print(batch.status, batch.request_counts)
    for line in client.files.content(batch.output_file_id or "").text.splitlines():
        answer = json.loads(line)
        print(answer["custom_id"], "->", answer["response"]["body"]["choices"][0]["message"])
