"""Tool calls as DeepSeek-V3.2 writes them, in tags that state whether a value is a bare string.

In the vocabulary ``｜DSML｜`` is a special token, and the rest of each tag is text.

A value after ``<｜DSML｜parameter name="city" string="true">`` is the text as it is, and after
``string="false"`` it is JSON.
"""

from __future__ import annotations

import json

from server.text.calls import ToolCallEmitter
from server.text.source import Markers, Read, Source
from server.text.xml_calls import read_json, read_text

TOKEN = "｜DSML｜"
OPENER, CLOSER = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
CALL_BEGIN, NAME_END, CALL_END = '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"
ARGUMENT_BEGIN, ARGUMENT_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
# After an argument's name, before a string and before JSON.
TEXT_BEGIN, JSON_BEGIN = '" string="true">', '" string="false">'
_KIND, _TEXT, _JSON = '" string="', 'true">', 'false">'
_MAX_NAME = 256
_VALUE_ENDS = Markers([ARGUMENT_END])


def read_calls(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read what follows the opener."""
    yield from source.read_space()
    yield from source.expect(CALL_BEGIN)
    yield from _read_call(source, calls)
    yield from source.read_space()
    while (yield from source.accept(CALL_BEGIN)):
        yield from _read_call(source, calls)
        yield from source.read_space()
    yield from source.accept(CLOSER)
    source.checkpoint = source.position


def _read_call(source: Source, calls: ToolCallEmitter) -> Read[None]:
    name = (yield from source.read_until(NAME_END, limit=_MAX_NAME)).strip()
    calls.begin(name)
    calls.add_arguments("{")
    between = ""
    while True:
        yield from source.read_space()
        if (yield from source.expect_one_of(CALL_END, ARGUMENT_BEGIN)) == CALL_END:
            break
        key = (yield from source.read_until(_KIND, limit=_MAX_NAME)).strip()
        kind = yield from source.expect_one_of(_TEXT, _JSON)
        calls.add_arguments(f"{between}{json.dumps(key)}: ")
        between = ", "
        yield from (read_text if kind == _TEXT else read_json)(source, calls, _VALUE_ENDS)
    calls.add_arguments("}")
    calls.end()
