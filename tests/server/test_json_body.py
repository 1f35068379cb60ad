"""Bodies as bytes: what is valid JSON, and the errors for what is not."""

from __future__ import annotations

import codecs

import pytest

from server.errors import ApiError
from server.openai.json_body import parse_json_body

BOM = codecs.BOM_UTF8


def test_a_byte_order_mark_is_passed_over() -> None:
    """As ``curl -d @file`` sends it if the file was written on Windows."""
    assert parse_json_body(BOM + b'{"a": "\xc3\xa9"}') == {"a": "\u00e9"}
    assert parse_json_body(b'{"a": "\xef\xbb\xbf"}') == {"a": "\ufeff"}  # a character, in a string


@pytest.mark.parametrize("body", [b"", b" \r\n"])
def test_a_body_that_is_empty_is_called_so(body: bytes) -> None:
    with pytest.raises(ApiError, match="The body is empty") as caught:
        parse_json_body(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "body", [BOM, BOM + BOM + b"{}", b"{}" + BOM, "{}".encode("utf-16"), BOM + b'{"a": "\xff"}']
)
def test_one_mark_at_the_beginning_and_no_other(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json_body(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (f'{{"a": [{{"b": 1}}], "tools": {DEEP}, "c": [["d"]]}}', "tools"),
        (f'{{"a": "\\"[{{[{{", "tools": [{{"x": {DEEP}}}]}}', "tools"),  # brackets in a string
        ('{"a":' * 5000 + "1" + "}" * 5000, "a"),
        ('{"tools": ' + "[" * 5000, "tools"),  # cut off
        (DEEP, None),
        (f'["a", {DEEP}]', None),
        (f'{{"a": "{"x" * 2**20}", "tools": {DEEP}}}', None),  # too long to be searched
    ],
)
def test_the_field_that_is_nested_too_deeply_is_named(body: str, param: str | None) -> None:
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        parse_json_body(body.encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert caught.value.param == param


def test_a_string_without_an_end_is_searched_once() -> None:
    """Were each of its escaped quotes the beginning of a search, this would take hours."""
    body = '{"tools": ' + "[" * 5000 + '"' + '\\"' * 500_000
    with pytest.raises(ApiError) as caught:
        parse_json_body(body.encode())
    assert caught.value.param == "tools"
