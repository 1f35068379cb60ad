"""Tools: the model requests a call, this program runs it, and the model states the result."""

import json
import os
import sys
from typing import Any

from openai import APIConnectionError, OpenAI

base_url = os.environ.get("OPENAI_BASE_URL") or "http://127.0.0.1:8000/v1"
if len(sys.argv) > 1:
    base_url = sys.argv[1]

parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
about = "Get the weather of a city."
function = {"name": "get_weather", "description": about, "parameters": parameters}
tools: list[Any] = [{"type": "function", "function": function}]


def get_weather(city: str) -> dict[str, object]:
    return {"city": city, "temperature": 21, "condition": "sunny"}


with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"no server answers at {base_url}; start one with: quire serve")
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    while True:
        completion = client.chat.completions.create(
            model=model, messages=messages, tools=tools, temperature=0
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            print(f"calls {call.function.name}({call.function.arguments})")
            result = get_weather(**json.loads(call.function.arguments))
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )
    print(message.content)
