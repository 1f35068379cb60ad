"""LangChain's ChatOpenAI: invoke, stream, structured output, tools, several at once."""

import asyncio
import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Capital(BaseModel):
    """A country's capital."""

    country: str = Field(max_length=20)
    city: str = Field(max_length=20)


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return f"sunny, 21 degrees in {city}"


def main(base_url: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=base_url, api_key="none", model=model, temperature=0, max_retries=0, max_tokens=128
    )
    asked = [SystemMessage("Be brief."), HumanMessage("What is the capital of France?")]
    answer = chat.invoke(asked)
    assert "Paris" in answer.content, answer
    assert answer.usage_metadata["output_tokens"] > 0, answer.usage_metadata
    assert answer.response_metadata["finish_reason"] == "stop"

    streamed = "".join(chunk.content for chunk in chat.stream(asked))
    assert streamed == answer.content, streamed

    for method in ("json_schema", "function_calling", "json_mode"):
        structured = chat.with_structured_output(Capital, method=method, include_raw=True)
        told = structured.invoke("Give the capital of France as JSON with country and city.")
        if method == "json_mode":  # any object may come back: only JSON is promised
            assert told["raw"].content.lstrip().startswith("{"), told
        else:
            assert isinstance(told["parsed"], Capital), told

    with_tools = chat.bind_tools([get_weather])
    question = HumanMessage("What is the weather in Paris?")
    call = with_tools.invoke([question])
    assert [c["name"] for c in call.tool_calls] == ["get_weather"], call
    arguments = call.tool_calls[0]["args"]
    assert set(arguments) == {"city"}, arguments
    result = ToolMessage(get_weather.invoke(arguments), tool_call_id=call.tool_calls[0]["id"])
    final = with_tools.invoke([question, call, result])
    assert final.content, final
    assert not final.tool_calls, final
    gathered = None
    for chunk in with_tools.stream([question]):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None
    assert gathered.tool_calls[0]["args"] == arguments, gathered
    forced = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Hello!")
    assert forced.tool_calls[0]["name"] == "get_weather", forced

    async def several() -> None:
        answers = await asyncio.gather(*(chat.ainvoke(asked) for _ in range(8)))
        assert {a.content for a in answers} == {answer.content}

    asyncio.run(several())

    # Otherwise it would count tokens with a vocabulary that it downloads.
    embeddings = OpenAIEmbeddings(
        base_url=base_url, api_key="none", model=model, check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["A cat sat.", "A dog ran."])
    assert len(first) == len(second) > 0
    assert first != second

    responses = ChatOpenAI(
        base_url=base_url, api_key="none", model=model, temperature=0, use_responses_api=True
    )
    assert "Paris" in responses.invoke(asked).text


if __name__ == "__main__":
    main(*sys.argv[1:])
