"""Structured output over HTTP: enforced by the grammar, or rejected before the answer begins."""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.servers import MODEL, Server, running_server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

# As guidance writes grammars; its client sends one under the older and the newer name at once.
GUIDANCE = """%llguidance {}

start: a "!"
a[capture, temperature=0.0, max_tokens=30]: "up" | "down"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("structured") / "log") as running:
        yield running


def schema_format(schema: object, **more: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def contents(answer: dict) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


# ---------------------------------------------------------------- constrained output


def test_a_schema_is_held_by_every_choice(server: Server):
    answer = server.chat(
        n=3, temperature=2, seed=1, max_tokens=100, response_format=schema_format(PERSON)
    ).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    for text in contents(answer):
        jsonschema.validate(json.loads(text), PERSON)
    assert answer["choices"][0]["message"]["refusal"] is None


def test_a_stream_gives_the_same_text_as_an_answer(server: Server):
    fields = {"seed": 3, "temperature": 1.5, "response_format": schema_format(PERSON)}
    (whole,) = contents(server.chat(**fields).json())
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], **fields}
    whole = contents(server.post("/v1/chat/completions", body).json())[0]
    events = server.stream("/v1/chat/completions", body).decode().split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(pieces) == whole
    jsonschema.validate(json.loads(whole), PERSON)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-[a-f]{2}"}}, r"\d{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["red (1)", "grün\n"]}}, r"red \(1\)|grün\n"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, r"true|false"),
        ({"structured_outputs": {"json": '{"const": 7}'}}, "7"),
        ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*"),
        ({"structured_outputs": {"grammar": 'start: "a"+ "b"\n'}}, "a+b"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] [0-9]?'}}, r"x\d\d?"),
        ({"guided_json": {"enum": [1, "two", None]}}, '1|"two"|null'),
        ({"guided_regex": "(yes|no)!"}, "(yes|no)!"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'start: %json {"type": "null"} "."'}, r"null\."),
        ({"grammar": 'root ::= "p" | "q"'}, "p|q"),
        ({"regex": "(on|off)?!"}, "(on|off)?!"),
        ({"ebnf": 'root ::= "r" | "s"'}, "r|s"),
        ({"guided_grammar": GUIDANCE, "structured_outputs": {"grammar": GUIDANCE}}, "(up|down)!"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, r"(?s)\{.*"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_each_way_to_ask_is_held_in_both_endpoints(server: Server, fields: dict, pattern: str):
    sampling = {"temperature": 2, "seed": 5, "max_tokens": 30, **fields}
    texts = contents(server.chat(**sampling).json())
    texts.append(server.complete(**sampling).json()["choices"][0]["text"])
    for text in texts:
        assert re.fullmatch(pattern, text), text


def test_the_sdk_parses_into_a_pydantic_model(server: Server):
    class Place(BaseModel):
        city: Literal["Paris", "Rome"]
        is_capital: bool
        rivers: Annotated[list[Literal["Seine", "Tiber"]], Field(max_length=2)]

    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            response_format=Place,
            temperature=0,
        )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Place)
    assert parsed.city == "Paris"


def test_what_a_model_would_run_on_in_is_bounded(server: Server):
    """At temperature 2 blanks are as likely as anything else; only a few fit."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 12}
    answer = server.chat(
        n=8, temperature=2, seed=2, max_tokens=600, response_format=schema_format(schema)
    ).json()
    for text in contents(answer):
        assert not re.search(r"[ \t]{26}|\n\s*\n", text)


def test_a_grammar_wins_over_what_would_keep_it_from_ending(server: Server):
    fields = {"min_tokens": 20, "ignore_eos": True, "max_tokens": 40}
    answer = server.chat(**fields, structured_outputs={"choice": ["yes", "no"]}).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] in ("yes", "no")


def test_stop_strings_and_logprobs_work_beside_it(server: Server):
    answer = server.chat(
        stop=["age"],
        logprobs=True,
        top_logprobs=2,
        response_format=schema_format(PERSON),
    ).json()
    choice = answer["choices"][0]
    assert choice["stop_reason"] == "age"
    assert choice["message"]["content"].endswith('"')
    told = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in told).startswith(choice["message"]["content"])
    assert any(entry["top_logprobs"][0]["token"] != entry["token"] for entry in told), (
        "the model is told of as it is, not as it is masked"
    )


# ---------------------------------------------------------------- tokens


def test_only_allowed_tokens_come(server: Server):
    ids = server.post("/tokenize", {"prompt": "red blue"}).json()["tokens"]
    answer = server.complete(
        allowed_token_ids=ids, temperature=2, seed=1, max_tokens=12, logprobs=0
    ).json()
    texts = {server.post("/detokenize", {"tokens": [id_]}).json()["prompt"] for id_ in ids}
    assert {token.strip() for token in answer["choices"][0]["logprobs"]["tokens"]} <= {
        text.strip() for text in texts
    }


def test_bad_words_do_not_come(server: Server):
    question = "What is the capital of France?"
    (text,) = contents(server.chat(question).json())
    assert "Paris" in text
    (without,) = contents(server.chat(question, bad_words=["Paris"]).json())
    assert "Paris" not in without
    (without,) = contents(server.chat(question, bad_words=["capital of France"]).json())
    assert "capital of France" not in without


# ---------------------------------------------------------------- rejected requests


def deep_one_of(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"oneOf": [schema, {"type": "integer"}]}
    return schema


NESTED_QUANTIFIERS = r"(((.{1,30}){1,30}){1,30}){1,30}a"


@pytest.mark.parametrize(
    ("schema", "code"),
    [
        ({"type": "stsring"}, None),
        ({"type": "string", "pattern": "(["}, None),
        ({"type": "object", "propertyNames": {"minLength": 2}}, None),
        ({"not": {"type": "string"}}, None),
        ({"$ref": "#/$defs/nowhere"}, None),
        ({"$ref": "https://example.com/schema.json"}, None),
        ({"enum": [f"value {index}" for index in range(100_000)]}, None),
        (deep_one_of(300), "grammar_timeout"),
        ({"type": "string", "pattern": NESTED_QUANTIFIERS}, "grammar_timeout"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_held_is_refused(server: Server, schema: dict, code: str | None):
    for stream in (False, True):
        answer = server.chat(response_format=schema_format(schema), stream=stream)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("response_format", code), error
        assert len(answer.content) < 4096


def test_unsupported_keywords_are_named(server: Server):
    answer = server.chat(response_format=schema_format({"type": "array", "uniqueItems": True}))
    assert "uniqueItems" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        {"guided_grammar": "start: start"},
        {"guided_regex": r"[^\s\S]"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_no_text_satisfies_is_told_so(server: Server, fields: dict):
    answer = server.chat(**fields)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert re.search("no (finite )?text satisfies it", message)
    assert message.endswith("does nothing but refer to itself")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs"),
        ({"structured_outputs": {"regex": NESTED_QUANTIFIERS}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(" * 30_000 + "a" + ")" * 30_000}}, None),
        ({"structured_outputs": {"grammar": "start: " + "(" * 30_000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= " + "(" * 30_000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_malformed_request_is_refused(server: Server, fields: dict, param: str | None):
    answer = server.chat(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param is None or error["param"] == param, error
    assert len(answer.content) < 4096


def test_options_without_effect_are_named(server: Server):
    answer = server.chat(
        max_tokens=4,
        structured_outputs={"json": {"const": 1}, "whitespace_pattern": " ", "backend": None},
    )
    assert answer.headers["x-quire-ignored-params"] == "structured_outputs.whitespace_pattern"
    wrapped = {"name": "x", "schema": {"const": 1}, "examples": [1]}
    answer = server.chat(
        max_tokens=4, response_format={"type": "json_schema", "json_schema": wrapped}
    )
    assert answer.headers["x-quire-ignored-params"] == "response_format.json_schema.examples"


def test_a_recursive_schema_is_served(server: Server):
    tree = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    answer = server.chat(max_tokens=200, response_format=schema_format(tree))
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), tree)


def test_the_server_is_whole_after_all_this(server: Server):
    assert server.get("/health").status_code == 200
    assert contents(server.chat().json())[0].startswith("The capital of France is Paris")
    assert server.metrics()["num_requests_running"] == 0
