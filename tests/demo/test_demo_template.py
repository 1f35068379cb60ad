"""The chat template in jinja's immutable sandbox, with the message formats that clients send."""

import json

import pytest
from jinja2 import TemplateError

from demo.evaluate import MODEL
from demo.template import TEMPLATE_PATH, render

USER = {"role": "user", "content": "Hello!"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter, <b>été</b> & 'more'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_a_plain_chat() -> None:
    assert render([USER]) == "<|im_start|>user\nHello!<|im_end|>\n"
    assert render([USER], add_generation_prompt=True).endswith("<|im_start|>assistant\n")


def test_content_may_be_parts() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    assert render([{"role": "user", "content": parts}]) == render([USER])


def test_a_part_that_is_no_text_is_refused() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(TemplateError, match="text parts only"):
        render([{"role": "user", "content": parts}])


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(TemplateError, match="Unknown role"):
        render([{"role": "wizard", "content": "x"}])


def test_developer_is_system() -> None:
    system = {"role": "system", "content": "Be brief."}
    developer = {"role": "developer", "content": "Be brief."}
    assert render([system, USER]) == render([developer, USER])
    assert render([system, USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_tools_are_listed_verbatim_in_the_system_turn() -> None:
    text = render([{"role": "system", "content": "Be brief."}, USER], [TOOL])
    listed = json.dumps(TOOL, ensure_ascii=False)
    assert text.startswith(
        "<|im_start|>system\nBe brief.\n\nYou may call these tools:\n"
        f"<tools>\n{listed}\n</tools><|im_end|>\n<|im_start|>user\n"
    )
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
def test_a_call_renders_alike_from_text_and_from_a_dict(arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = render([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n'
        "</tool_call><|im_end|>\n"
    )


def test_parallel_calls_and_results_share_their_turns() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    text = render(
        [
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
            USER,
        ]
    )
    assert "</tool_call>\n<tool_call>" in text
    assert (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>user\nHello!"
    ) in text


def test_thinking_is_asked_for_in_the_system_turn() -> None:
    plain = render([USER])
    assert render([USER], enable_thinking=False) == plain
    assert "Think step by step" in render([USER], enable_thinking=True)


def test_the_model_ships_this_template_once() -> None:
    shipped = (MODEL / "chat_template.jinja").read_text(encoding="utf-8")
    assert shipped == TEMPLATE_PATH.read_text(encoding="utf-8")
    config = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert "chat_template" not in config
