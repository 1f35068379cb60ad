import asyncio
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidParameter, TemplateError
from engine.sandbox import process, worker
from engine.text import template_worker
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def chat(chatml: Tokenizer):
    template = ChatTemplate.from_source(CHATML, chatml)
    template.start()
    yield template
    template.close()


def rendered(source: str, tokenizer: Tokenizer, limit_s: float = 5.0, **arguments) -> str:
    template = ChatTemplate.from_source(source, tokenizer, limit_s=limit_s)
    try:
        return template.render_sync(USER, **arguments)
    finally:
        template.close()


# ------------------------------------------------------------ rendering


def test_the_text_is_that_of_transformers(chatml: Tokenizer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = CHATML + (
        "{% generation %}  x {% endgeneration %}\n"
        "    {% if true %}\n  indented\n    {% endif %}\n"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ {'b': 'é<\\'', 'a': [1, none]} | tojson(indent=2) }}{{ undefined_name }}{{ extra }}"
        "{{ tools is none }}{{ documents is none }}{{ eos_token }}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": "<&>"}}}]
    for given_tools in (None, tools):
        (expected,), _ = render_jinja_template(
            conversations=[USER],
            tools=given_tools,
            chat_template=source,
            add_generation_prompt=True,
            eos_token="<|im_end|>",
            extra="more",
        )
        text = rendered(source, chatml, tools=given_tools, template_kwargs={"extra": "more"})
        assert text == expected


def test_the_final_message_can_be_left_open(chat: ChatTemplate) -> None:
    for content in ("Sure: ", [{"type": "text", "text": "Sure: "}]):
        messages = [*USER, {"role": "assistant", "content": content}]
        text = chat.render_sync(messages, continue_final_message=True)
        assert text.endswith("<|im_start|>assistant\nSure: ")
        closed = chat.render_sync(messages, add_generation_prompt=False)
        assert closed == text + "<|im_end|>\n"
    with pytest.raises(InvalidParameter):
        chat.render_sync([{"role": "assistant"}], continue_final_message=True)


# Like LLaVA's: string content has no parts and would vanish.
PARTS_ALONE = """\
{%- for message in messages %}{{ message.role | upper }}:
{%- for part in message.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %} {{ part.text }}
{%- endfor %};{% endfor %}"""


def test_a_template_of_parts_alone_is_given_parts(chatml: Tokenizer) -> None:
    template = ChatTemplate.from_source(PARTS_ALONE, chatml)
    image = [{"type": "text", "text": "What?"}, {"type": "image"}]
    said = {"role": "assistant", "content": "A cat"}
    messages = [{"role": "user", "content": image}, said, *USER]
    try:
        assert template.render_sync(messages) == "USER:<image> What?;ASSISTANT: A cat;USER: Hi;"
        left_open = template.render_sync([*USER, said], continue_final_message=True)
        assert left_open == "USER: Hi;ASSISTANT: A cat"
    finally:
        template.close()


def test_a_template_that_takes_strings_is_given_strings(chatml: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content is string }}{{ m.content }} {% endfor %}"
    assert rendered(source, chatml) == "TrueHi "


def test_reserved_variables_cannot_be_set(chat: ChatTemplate) -> None:
    for name in ("messages", "tools", "eos_token", "chat_template", "raise_exception"):
        with pytest.raises(InvalidParameter) as caught:
            chat.render_sync(USER, template_kwargs={name: "x"})
        assert caught.value.param == "chat_template_kwargs"


def test_lone_surrogates_are_placed(chat: ChatTemplate) -> None:
    with pytest.raises(InvalidParameter) as caught:
        chat.render_sync([*USER, {"role": "user", "content": "\ud800"}])
    assert caught.value.param == "messages.1.content"


async def test_concurrent_renders_keep_apart(chat: ChatTemplate) -> None:
    contents = [f"number {i}\0" + "x" * (i * 7919) for i in range(30)]
    texts = await asyncio.gather(
        *(chat.render([{"role": "user", "content": content}]) for content in contents)
    )
    assert [text.split("\n")[1] for text in texts] == [f"{text}<|im_end|>" for text in contents]


# ------------------------------------------------------------ templates that misbehave

MISBEHAVING = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "finish",
    "{{ 9 ** (9 ** 9) }}": "finish",  # evaluated at compile time
    "{{ 'x' * 10 ** 10 }}": "memory",
    "{% set n = namespace(x='0123456789') %}"
    "{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "memory",
    "{{ ''.__class__.__mro__ }}": "__class__",
    "{{ raise_exception.__globals__ }}": "__globals__",
    "{{ messages.append(1) }}": "append",
    "{{ ''.join(['%s']).format_map({}).x.y }}": "failed",
    "{{ messages[7].content }}": "no element",
    "{% include '/etc/passwd' %}": "failed",
    "{% if %}": "failed",
    "{{ raise_exception('Roles must alternate') }}": "^Roles must alternate$",
    "{{ raise_exception('x' * 9999) }}": "^x{500}$",
}


@pytest.mark.parametrize("source", MISBEHAVING)
def test_a_template_that_misbehaves_is_an_error_of_the_request(
    chatml: Tokenizer, source: str
) -> None:
    limit_s = 0.3 if MISBEHAVING[source] == "finish" else 20.0
    template = ChatTemplate(
        {"default": "{% if x is defined %}" + source + "{% endif %}ok", "tool_use": source},
        chatml,
        limit_s=limit_s,
    )
    try:
        with pytest.raises(TemplateError, match=MISBEHAVING[source]) as caught:
            template.render_sync(USER, tools=[{}])
        assert caught.value.code == "template_error"
        assert len(caught.value.message) <= 500
        assert "/" not in caught.value.message.replace("'/etc/passwd'", "")
        if "%}" not in source.removeprefix("{% if") and "**" not in source:  # it compiles
            assert template.render_sync(USER) == "ok"
    finally:
        template.close()


def test_without_a_template_the_request_is_told_so(chatml: Tokenizer, tmp_path: Path) -> None:
    template = ChatTemplate.from_dir(tmp_path, chatml)
    assert template.source is None
    template.start()
    with pytest.raises(TemplateError, match="no chat template"):
        template.render_sync(USER)


# ------------------------------------------------------------ the process


def child(template: ChatTemplate) -> int:
    process = template._process._process._child
    assert process is not None
    return process.pid


def test_the_process_has_nothing_of_its_parent(
    chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    inherited = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    template = ChatTemplate.from_source("{{ messages }}", chatml)
    try:
        template.render_sync(USER)
        proc = Path("/proc") / str(child(template))
        assert sorted(os.listdir(proc / "fd")) == ["0", "1", "2"]
        assert b"secret" not in (proc / "environ").read_bytes()
        limits = (proc / "limits").read_text()
        assert "Max open files            3 " in limits
        assert "Max address space         unlimited" not in limits
    finally:
        template.close()
        os.close(inherited)


def test_a_killed_process_is_replaced_and_a_closed_one_is_gone(chatml: Tokenizer) -> None:
    template = ChatTemplate.from_source("ok", chatml)
    assert template.render_sync(USER) == "ok"
    first = child(template)
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert template.render_sync(USER) == "ok"
    second = child(template)
    assert second != first
    template.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_a_process_whose_parent_is_gone_ends_by_itself() -> None:
    child = subprocess.Popen(
        [sys.executable, worker.__file__, template_worker.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    child.stdin.write(
        process._frame({"templates": {"default": loop}, "limit_s": 0.2, "memory_bytes": 2**28})
        + process._frame({"template": "default", "context": {}})
    )
    child.stdin.close()
    assert child.wait(timeout=60) == -signal.SIGPROF
    (size,) = struct.unpack(">I", child.stdout.read(4))
    assert b"ready" in child.stdout.read(size)
    child.stdout.close()


def test_a_process_that_gets_no_core_is_waited_for(chatml: Tokenizer) -> None:
    template = ChatTemplate.from_source("{{ messages | length }}", chatml, limit_s=0.2)
    try:
        assert template.render_sync(USER) == "1"
        child = template._process._process._child
        assert child is not None
        child.send_signal(signal.SIGSTOP)
        threading.Timer(0.8, child.send_signal, [signal.SIGCONT]).start()
        assert template.render_sync(USER) == "1"
    finally:
        template.close()


# ------------------------------------------------------------ token ids

CONTENT = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<", "|im_end|>", "<|im_", "end|>", "</s>"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=5,
)


@settings(max_examples=50)
@given(parts=CONTENT, as_parts=st.booleans())
def test_spellings_in_a_request_stay_plain_text(
    chat: ChatTemplate, chatml: Tokenizer, parts: list[str], as_parts: bool
) -> None:
    """Also if the template itself joins the parts of a spelling."""
    content = [{"type": "text", "text": part} for part in parts] if as_parts else "".join(parts)
    tools = [{"function": {"name": "".join(parts), "".join(parts): None}}]
    messages = [{"role": "user", "content": content}]
    ids = chat.encode_chat_sync(messages, tools=tools)
    text = chat.render_sync(messages, tools=tools)
    assert chatml.decode(ids, skip_special_tokens=False) == text
    empty = chat.encode_chat_sync([{"role": "user", "content": ""}], tools=[{}])
    specials = [id_ for id_ in ids if id_ in chatml.special_ids]
    assert specials == [id_ for id_ in empty if id_ in chatml.special_ids]


async def test_a_conversation_without_spellings_is_encoded_as_its_text(
    chat: ChatTemplate, chatml: Tokenizer
) -> None:
    messages = [
        {"role": "user", "content": "a < b, 你好"},
        {"role": "assistant", "content": "x<y|"},
    ]
    ids = await chat.encode_chat(messages)
    plain = chatml.encode(await chat.render(messages), parse_special=True)
    assert ids == plain


def test_a_template_s_own_bos_is_the_only_one() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, processors

    backend = Backend(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(backend, named_tokens={"bos_token": "<s>"}, add_bos_token=True)
    template = ChatTemplate.from_source("{{ bos_token }}a", tokenizer)
    try:
        assert template.encode_chat_sync(USER) == [0, 1]
    finally:
        template.close()


def test_what_is_nested_very_deeply_is_named(chat: ChatTemplate) -> None:
    nested: Any = {}
    for _ in range(5000):
        nested = {"x": nested}
    cases: list[tuple[str, list[Any], Any]] = [
        ("messages.1", [*USER, {"role": "user", "content": nested}], {}),
        ("tools", USER, {"tools": [nested]}),
        ("chat_template_kwargs", USER, {"template_kwargs": {"variable": nested}}),
    ]
    for param, messages, options in cases:
        with pytest.raises(InvalidParameter, match=f"'{param}' is nested too deeply") as caught:
            chat.encode_chat_sync(messages, **options)
        assert caught.value.param == param


# ------------------------------------------------------------ sources of templates


@pytest.mark.parametrize(
    ("files", "without_tools", "with_tools"),
    [
        ({"tokenizer_config.json": '{"chat_template": "one"}'}, "one", "one"),
        (
            {
                "tokenizer_config.json": '{"chat_template": ['
                '{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]}'
            },
            "one",
            "two",
        ),
        (
            {
                "tokenizer_config.json": '{"chat_template": "old"}',
                "chat_template.jinja": "one",
                "additional_chat_templates/tool_use.jinja": "two",
            },
            "one",
            "two",
        ),
    ],
)
def test_templates_are_found_in_all_their_places(
    tmp_path: Path, chatml: Tokenizer, files: dict, without_tools: str, with_tools: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    found = ChatTemplate.from_dir(tmp_path, chatml)
    (tmp_path / "mine.jinja").write_text("mine")
    override = str(tmp_path / "mine.jinja")
    for template, expected in (
        (found, [without_tools, with_tools]),
        (ChatTemplate.from_dir(tmp_path, chatml, override), ["mine"] * 2),
        (ChatTemplate.from_dir(tmp_path, chatml, "{{ 'inline' }}"), ["inline"] * 2),
    ):
        assert [template.render_sync(USER), template.render_sync(USER, tools=[{}])] == expected
        template.close()
