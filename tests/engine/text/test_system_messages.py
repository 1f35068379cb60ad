"""System messages where a template would refuse them or leave them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from engine.errors import TemplateError
from engine.text.system_messages import SystemPlaces, place_system_messages
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer

_TEXT = """\
{%- macro text(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}{{ part.text or '<image>' }}{% endfor %}{% endif %}{% endmacro %}"""
_ALL = _TEXT + "{% for m in messages %}{{ m.role[0] }}:{{ text(m.content) }};{% endfor %}"
# As Qwen3.5's and later ones.
_FIRST_ALONE = _TEXT + (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role[0] }}:{{ text(m.content) }};{% endfor %}"
)
# As gpt-oss's: later ones vanish.
_FIRST_SHOWN = _TEXT + (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ m.role[0] }}:{{ text(m.content) }};{% endif %}{% endfor %}"
)
# As Gemma 2's.
_NO_ROLE = _TEXT + (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.role[0] }}:{{ text(m.content) }};{% endfor %}"
)
# Several at the beginning are one turn; later ones are refused.
_LEADING = _TEXT + (
    "{% set said = namespace(else=false) %}{% for m in messages %}"
    "{% if m.role == 'system' and said.else %}{{ raise_exception('Too late') }}{% endif %}"
    "{% if m.role != 'system' %}{% set said.else = true %}{% endif %}"
    "{{ m.role[0] }}:{{ text(m.content) }};{% endfor %}"
)


@pytest.fixture
def make(chatml: Tokenizer) -> Iterator[Any]:
    made: list[ChatTemplate] = []

    def of(source: str) -> ChatTemplate:
        made.append(ChatTemplate.from_source(source, chatml))
        return made[-1]

    yield of
    for template in made:
        template.close()


def said(text: str) -> list[dict[str, Any]]:
    """Messages written as ``u:Hi s:Be brief``."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    pairs = (each.split(":") for each in text.split())
    return [{"role": roles[role], "content": content} for role, content in pairs]


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (_ALL, "s:A s:B u:1 s:C", "s:A;s:B;u:1;s:C;"),
        (_FIRST_ALONE, "s:A s:B u:1", "s:A\n\nB;u:1;"),
        (_FIRST_ALONE, "s:A u:1 s:B", "s:A\n\nB;u:1;"),  # Claude Code's
        (_FIRST_ALONE, "u:1 s:A a:2 s:B u:3", "s:A\n\nB;u:1;a:2;u:3;"),
        (_FIRST_SHOWN, "s:A u:1 a:2 s:B u:3", "s:A\n\nB;u:1;a:2;u:3;"),
        (_FIRST_SHOWN, "u:1 a:2 u:3", "u:1;a:2;u:3;"),
        (_NO_ROLE, "s:A u:1 a:2", "u:A\n\n1;a:2;"),
        (_NO_ROLE, "a:0 s:A u:1 s:B", "a:0;u:A\n\nB\n\n1;"),
        (_NO_ROLE, "s:A", "u:A;"),
        (_LEADING, "s:A s:B u:1 s:C a:2", "s:A;s:B\n\nC;u:1;a:2;"),
    ],
)
def test_system_messages_are_moved_to_where_the_template_shows_them(
    make, source: str, messages: str, expected: str
) -> None:
    assert make(source).render_sync(said(messages), add_generation_prompt=False) == expected


def test_contents_of_parts_are_joined_as_parts(make) -> None:
    picture = [{"type": "image"}, {"type": "text", "text": "What?"}]
    parts = [{"type": "text", "text": "A"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": picture}]
    assert make(_NO_ROLE).render_sync(messages) == "u:A\n\n<image>What?;"
    later = [*messages, *said("s:B")]
    assert make(_FIRST_ALONE).render_sync(later) == "s:A\n\nB;u:<image>What?;"


def test_a_template_that_refuses_everything_is_not_blamed_on_system_messages(make) -> None:
    template = make("{{ raise_exception('No') }}")
    with pytest.raises(TemplateError, match=r"^No$"):
        template.render_sync(said("s:A u:1"))


def test_a_template_is_tried_once(make, monkeypatch: pytest.MonkeyPatch) -> None:
    template = make(_FIRST_ALONE)
    template.render_sync(said("s:A u:1"))
    contexts: list[Any] = []
    render = template._process.render
    monkeypatch.setattr(
        template._process, "render", lambda *given: contexts.append(given) or render(*given)
    )
    template.render_sync(said("s:A u:1 s:B"))
    assert len(contexts) == 1


def shown(messages: Sequence[Any], role: str) -> str:
    texts = "\n\n".join(each["content"] for each in messages if each["role"] == role)
    return texts.replace("\n\n", "")


@pytest.mark.parametrize("places", list(product((False, True), repeat=3)))
def test_no_text_is_lost_and_none_overtakes_another_of_its_role(places) -> None:
    places = SystemPlaces(*places)
    for roles in product("sua", repeat=4):
        given = said(" ".join(f"{role}:{index}" for index, role in enumerate(roles)))
        placed = place_system_messages(given, places)
        assert shown(placed, "assistant") == shown(given, "assistant")
        if places.begins or places.anywhere:
            assert shown(placed, "user") == shown(given, "user")
            assert shown(placed, "system") == shown(given, "system")
        else:
            assert not shown(placed, "system")
            assert sorted(shown(placed, "user")) == sorted(
                shown(given, "user") + shown(given, "system")
            )
