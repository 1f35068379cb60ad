"""LiteLLM through its OpenAI route: completion, stream, tools, JSON schema, embeddings, errors."""

import asyncio
import json
import sys
from functools import partial

import litellm

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = [{"role": "user", "content": "one two three " * 5000}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def main(base_url: str, model: str) -> None:
    where = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none", "num_retries": 0}
    ask = partial(litellm.completion, **where, temperature=0)
    answer = ask(messages=QUESTION)
    text = answer.choices[0].message.content
    assert "Paris" in text, answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    chunks = list(ask(messages=QUESTION, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == text, rebuilt
    assert rebuilt.usage.completion_tokens == answer.usage.completion_tokens

    called = ask(
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice="required",
    ).choices[0]
    assert called.finish_reason == "tool_calls", called
    assert set(json.loads(called.message.tool_calls[0].function.arguments)) == {"city"}

    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": schema, "strict": True},
    }
    structured = ask(messages=QUESTION, response_format=wanted)
    assert set(json.loads(structured.choices[0].message.content)) == {"city"}

    async def several() -> None:
        asks = (litellm.acompletion(**where, temperature=0, messages=QUESTION) for _ in range(8))
        assert {a.choices[0].message.content for a in await asyncio.gather(*asks)} == {text}

    asyncio.run(several())

    vectors = litellm.embedding(
        **where, input=["A cat sat.", "A dog ran."], encoding_format="float"
    )
    assert [entry["index"] for entry in vectors.data] == [0, 1]

    try:
        litellm.completion(**{**where, "model": "openai/no-such-model"}, messages=QUESTION)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("an unknown model was answered")
    for route in ("openai", "hosted_vllm"):
        try:
            litellm.completion(**{**where, "model": f"{route}/{model}"}, messages=LONG)
        except litellm.ContextWindowExceededError:
            pass
        else:
            raise AssertionError("a conversation beyond the context was answered")


if __name__ == "__main__":
    main(*sys.argv[1:])
