"""The anthropic SDK: messages, streams, counting, tools and their results, errors."""

import asyncio
import sys
import time

import anthropic

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def main(base_url: str, model: str) -> None:
    root = base_url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)
    asked = {"model": model, "max_tokens": 100, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**asked, system="Be brief.", messages=QUESTION)
    assert "Paris" in answer.content[0].text, answer
    assert answer.stop_reason == "end_turn", answer
    counted = client.messages.count_tokens(model=model, system="Be brief.", messages=QUESTION)
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens, (counted, used)

    with client.messages.stream(**asked, system="Be brief.", messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == answer.content[0].text == final.content[0].text
    assert final.usage.output_tokens == answer.usage.output_tokens

    weather = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced = {"type": "tool", "name": "get_weather"}
    called = client.messages.create(**asked, messages=weather, tools=[WEATHER], tool_choice=forced)
    (block,) = [b for b in called.content if b.type == "tool_use"]
    assert called.stop_reason == "tool_use", called
    assert set(block.input) == {"city"}, block
    with client.messages.stream(
        **asked, messages=weather, tools=[WEATHER], tool_choice=forced
    ) as stream:
        streamed = stream.get_final_message()
    (again,) = [b for b in streamed.content if b.type == "tool_use"]
    assert again.input == block.input, again
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny, 21 degrees"}
    history = [
        *weather,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    worded = client.messages.create(**asked, messages=history, tools=[WEATHER])
    assert worded.content[0].type == "text", worded

    params = {"model": model, "max_tokens": 100, "temperature": 0, "messages": QUESTION}
    batch = client.messages.batches.create(requests=[{"custom_id": "a", "params": params}])
    while batch.processing_status != "ended":
        time.sleep(0.1)
        batch = client.messages.batches.retrieve(batch.id)
    (line,) = client.messages.batches.results(batch.id)
    assert line.custom_id == "a", line
    assert "Paris" in line.result.message.content[0].text, line
    assert batch.id in [each.id for each in client.messages.batches.list(limit=1)]
    assert client.messages.batches.delete(batch.id).id == batch.id

    file = client.files.upload(file=("facts.txt", b"The capital of France is Paris.", "text/plain"))
    assert file.id in [each.id for each in client.files.list(limit=1)]
    document = {"type": "document", "source": {"type": "file", "file_id": file.id}}
    content = [document, {"type": "text", "text": "What is the capital of France?"}]
    about_it = client.messages.create(**asked, messages=[{"role": "user", "content": content}])
    assert about_it.usage.input_tokens > used.input_tokens, about_it
    assert client.files.download(file.id).read() == b"The capital of France is Paris."
    assert client.files.delete(file.id).id == file.id

    async def several() -> None:
        async with anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0) as many:
            asks = (many.messages.create(**asked, messages=QUESTION) for _ in range(8))
            assert len({a.content[0].text for a in await asyncio.gather(*asks)}) == 1

    asyncio.run(several())

    refusal = None
    try:
        client.messages.create(**{**asked, "model": "no-such-model"}, messages=QUESTION)
    except anthropic.NotFoundError as error:
        refusal = error.body
    assert refusal is not None, "an unknown model was answered"
    assert refusal["error"]["type"] == "not_found_error", refusal


if __name__ == "__main__":
    main(*sys.argv[1:])
