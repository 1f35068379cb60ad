"""Tools of /v1/responses beside plain functions: what agents send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.asgi import Application, FakeEngine, running_app

PATH = "/v1/responses"
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}"
)
_QWEN_CODER = _TEMPLATE + "{# <tool_call> <function= <parameter= #}"
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SHELL = {
    "type": "function",
    "name": "shell",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}
MCP = {
    "type": "namespace",
    "name": "mcp__notes__",
    "description": "Tools in the mcp__notes__ namespace.",
    "tools": [{"type": "function", "name": "find", "strict": False}],
}
HOSTED = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]


@pytest.fixture
async def app(tmp_path: Path):
    source = tmp_path / "template.jinja"
    source.write_text(_TEMPLATE)
    engine = FakeEngine()
    engine.max_model_len = 4096
    async with running_app(engine=engine, chat_template=source) as app:
        yield app


async def ask(app: Application, written: str, **fields: Any) -> tuple[dict[str, Any], str, Any]:
    """Ask, and have the model write a text; the response, its prompt, and the exchange."""
    tokenizer = (await app.state.model()).tokenizer
    call = app.post(PATH, store=False, **{"input": "Hi", **fields})
    stream = await app.engine.next_stream()
    stream.put(*tokenizer.encode(written, add_special_tokens=False), end="stop")
    await call.done()
    assert call.status == 200, call.body
    return json.loads(call.body), tokenizer.decode(stream.request.prompt_token_ids), call


async def test_tools_that_others_run_are_left_out_beside_the_clients_own(app: Application) -> None:
    response, prompt, call = await ask(app, "Hello", tools=[HOSTED[0], SHELL, HOSTED[1]])
    assert call.headers["x-quire-ignored-params"] == "tools.0,tools.2"
    assert [tool["name"] for tool in response["tools"]] == ["shell"]
    assert "web_search" not in prompt
    for tools in (HOSTED, [SHELL, {"type": "functoin", "name": "f"}]):
        refused = await app.post(PATH, input="Hi", tools=tools).done()
        assert refused.status == 400
        assert refused.error["param"] in ("tools.0.type", "tools.1.type")
    forced = {"type": "web_search"}
    refused = await app.post(PATH, input="Hi", tools=[*HOSTED, SHELL], tool_choice=forced).done()
    assert (refused.status, refused.error["param"]) == (400, "tool_choice")


async def test_strict_servers_refuse_them(tmp_path: Path) -> None:
    async with running_app(strict=True) as app:
        refused = await app.post(PATH, input="Hi", tools=[SHELL, HOSTED[0]]).done()
        assert (refused.status, refused.error["param"]) == (400, "tools.1")


async def test_a_namespace_is_part_of_its_tools_names(app: Application) -> None:
    written = '<tool_call>{"name": "mcp__notes__find", "arguments": {"a": 1}}</tool_call>'
    response, prompt, _ = await ask(app, written, tools=[SHELL, MCP])
    assert '"name": "mcp__notes__find"' in prompt
    (item,) = response["output"]
    assert (item["type"], item["name"], item["namespace"]) == (
        "function_call",
        "find",
        "mcp__notes__",
    )
    assert response["tools"][1]["tools"][0]["name"] == "find"
    again = [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "none"}]
    _, prompt, call = await ask(app, "Hello", input=again, tools=[SHELL, MCP])
    assert '<tool_call>{"name": "mcp__notes__find", "arguments": {"a": 1}}</tool_call>' in prompt
    assert "x-quire-ignored-params" not in call.headers


async def test_a_custom_tool_is_called_with_a_text(app: Application) -> None:
    arguments = json.dumps({"input": "*** Begin\n+x\n"})
    recursive = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "x"'}
    patch = {**PATCH, "format": recursive}
    written = f'<tool_call>{{"name": "apply_patch", "arguments": {arguments}}}</tool_call>'
    response, prompt, call = await ask(app, written, tools=[patch])
    assert 'must match this lark grammar:\\nstart: \\"(\\" start' in prompt
    assert call.headers["x-quire-ignored-params"] == "tools.0.format"
    (item,) = response["output"]
    assert item["type"] == "custom_tool_call"
    assert (item["name"], item["input"]) == ("apply_patch", "*** Begin\n+x\n")
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done"}
    _, prompt, call = await ask(app, "Hello", input=[item, output], tools=[PATCH])
    assert f'"arguments": {arguments}' in prompt
    assert "[tool]Done" in prompt
    assert "x-quire-ignored-params" not in call.headers  # this one is held


async def test_a_custom_tool_can_be_required(app: Application) -> None:
    written = '<tool_call>{"name": "apply_patch", "arguments": {"input": "x"}}</tool_call>'
    choice = {"type": "custom", "name": "apply_patch"}
    response, _, _ = await ask(app, written, tools=[SHELL, PATCH], tool_choice=choice)
    assert response["output"][0]["input"] == "x"
    assert response["tool_choice"] == choice


async def test_a_format_that_cannot_be_held_is_named_where_it_is(app: Application) -> None:
    behind = {"type": "grammar", "syntax": "regex", "definition": "(?<=a)b"}
    inside = {**MCP, "tools": [MCP["tools"][0], {"type": "custom", "name": "p", "format": behind}]}
    refused = await app.post(PATH, input="Hi", tools=[SHELL, inside]).done()
    assert (refused.status, refused.error["param"]) == (400, "tools.1.tools.1.format")
    assert "look-around" in refused.error["message"]
    for lacking in ("syntax", "definition"):
        part = {name: value for name, value in behind.items() if name != lacking}
        tools = [{"type": "custom", "name": "p", "format": part}]
        refused = await app.post(PATH, input="Hi", tools=tools).done()
        assert (refused.status, refused.error["param"]) == (400, f"tools.0.format.{lacking}")


UNENFORCEABLE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


async def test_a_schema_is_enforced_if_it_can_be_unless_the_request_decides(
    app: Application,
) -> None:
    tools = [
        {"type": "function", "name": "f", "parameters": UNENFORCEABLE},
        {"type": "function", "name": "g"},
    ]
    response, _, _ = await ask(app, "Hello", tools=tools)
    assert [tool["strict"] for tool in response["tools"]] == [False, True]
    tools[0]["strict"] = True
    refused = await app.post(PATH, input="Hi", tools=tools).done()
    assert (refused.status, refused.error["param"]) == (400, "tools")


async def test_schemas_of_formats_that_do_not_quote_texts(tmp_path: Path) -> None:
    """Such as Qwen3-Coder's, in which fewer keywords can be enforced than in JSON."""
    source = tmp_path / "template.jinja"
    source.write_text(_QWEN_CODER)
    engine = FakeEngine()
    engine.max_model_len = 4096
    headers = {"type": "object", "patternProperties": {"^x-": {"type": "string"}}}
    async with running_app(engine=engine, chat_template=source) as app:
        tools = [{"type": "function", "name": "open", "parameters": headers}]
        response, _, _ = await ask(app, "Hello", tools=tools)
        assert response["tools"][0]["strict"] is False


async def test_an_error_names_the_tool_where_it_is(app: Application) -> None:
    bad = {"type": "function", "name": "f", "parameters": {"type": "array"}}
    inside = {**MCP, "tools": [{"type": "function", "name": "ok"}, bad]}
    refused = await app.post(PATH, input="Hi", tools=[HOSTED[0], SHELL, inside]).done()
    assert (refused.status, refused.error["param"]) == (400, "tools.2.tools.1")
    assert "'tools.2.tools.1'" in refused.error["message"]


async def test_reasoning_that_only_another_maker_can_read_is_left_out(app: Application) -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
    conversation = [{"role": "user", "content": "Hi"}, sealed, {"role": "user", "content": "Go"}]
    _, prompt, call = await ask(app, "Hello", input=conversation)
    assert call.headers["x-quire-ignored-params"] == "input.1.encrypted_content"
    assert "gAAAAABo" not in prompt
