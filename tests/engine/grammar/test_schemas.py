"""Every text that the demo model finishes under a schema satisfies it."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from functools import partial

import jsonschema
import pytest

from engine import LLM, SamplingParams
from engine.errors import InvalidParameter
from engine.types import Grammar
from tests.engine.grammar.schemas import REFUSED, SCHEMAS, Schema

MAX_TOKENS = 80

CHECKER = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))


@CHECKER.checks("time")
def is_time(value: object) -> bool:
    return bool(re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(Z|z|[+-]\d\d:\d\d)", str(value)))


@CHECKER.checks("date-time")
def is_date_time(value: object) -> bool:
    date, _, time = str(value).upper().partition("T")
    return CHECKER.conforms(date, "date") and is_time(time)


@CHECKER.checks("duration")
def is_duration(value: object) -> bool:
    return bool(re.fullmatch(r"P(?!$)[\dYMWD]*(T(?!$)[\dHMS]+)?", str(value)))


@CHECKER.checks("hostname")
def is_hostname(value: object) -> bool:
    label = r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
    return bool(re.fullmatch(rf"{label}(\.{label})*", str(value)))


def is_uuid(value: object, version: int) -> bool:
    return len(str(value)) == 36 and uuid.UUID(str(value)).version == version


for version in range(1, 9):
    CHECKER.checks(f"uuid{version}", ValueError)(partial(is_uuid, version=version))


@CHECKER.checks("base64", ValueError)
@CHECKER.checks("byte", ValueError)
def is_base64(value: object) -> bool:
    return base64.b64decode(str(value), validate=True) is not None


@CHECKER.checks("base64url", ValueError)
def is_base64url(value: object) -> bool:
    return base64.b64decode(str(value), altchars=b"-_", validate=True) is not None


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, dtype="float32", num_gpu_blocks_override=4096, use_tqdm=False) as model:
        yield model


def texts(llm: LLM, schemas: Sequence[Schema], temperature: float) -> list[str | None]:
    """A text for each schema; None if the model did not finish."""
    params = [
        SamplingParams(
            grammar=Grammar("json_schema", json.dumps(schema)),
            temperature=temperature,
            max_tokens=MAX_TOKENS,
            seed=seed,
        )
        for seed, schema in enumerate(schemas)
    ]
    prompt = "Answer in JSON: what is the capital of France?"
    results = llm.generate([prompt] * len(params), params, use_tqdm=False)
    outputs = [result.outputs[0] for result in results]
    assert all(output.finish_reason in ("stop", "length") for output in outputs)
    return [output.text if output.finish_reason == "stop" else None for output in outputs]


def check(llm: LLM, names: Sequence[str], temperature: float) -> None:
    told = texts(llm, [SCHEMAS[name] for name in names], temperature)
    for name, text in zip(names, told, strict=True):
        if text is not None:
            validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=CHECKER)
            problems = [error.message for error in validator.iter_errors(json.loads(text))]
            assert not problems, f"{name}: {text!r}"
    ended = sum(text is not None for text in told)
    assert ended >= 0.75 * len(names), "too few came to their end for this to show anything"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_all_schemas_are_held(llm: LLM, temperature: float) -> None:
    assert len(SCHEMAS) >= 300
    check(llm, list(SCHEMAS), temperature)


def test_there_is_a_schema_for_each_keyword() -> None:
    whole = json.dumps(list(SCHEMAS.values()))
    keywords = """
        type const enum minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength
        maxLength pattern format items prefixItems minItems maxItems properties required
        additionalProperties patternProperties minProperties maxProperties anyOf oneOf allOf $ref
        $defs definitions title description default examples $comment
    """
    assert [word for word in keywords.split() if f'"{word}":' not in whole] == []


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_held_is_refused_by_name(llm: LLM, word: str) -> None:
    params = SamplingParams(grammar=Grammar("json_schema", json.dumps(REFUSED[word])))
    with pytest.raises(InvalidParameter, match=re.escape(word)):
        llm.generate("x", params, use_tqdm=False)


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", '{"const": NaN}', '{"const": 1e999}'])
def test_what_is_no_schema_is_refused(llm: LLM, text: str) -> None:
    with pytest.raises(InvalidParameter):
        llm.generate("x", SamplingParams(grammar=Grammar("json_schema", text)), use_tqdm=False)


def test_keywords_that_say_nothing_do_no_harm(llm: LLM) -> None:
    schema: Schema = {"type": "array", "uniqueItems": False, "items": {"const": 1}, "maxItems": 2}
    (text,) = texts(llm, [schema], 0.0)
    assert text is not None
    jsonschema.validate(json.loads(text), schema)


def test_a_schema_cannot_loosen_its_own_rules(llm: LLM) -> None:
    """The library reads options from the schema; here the server's options apply."""
    schema = {"not": {"type": "object"}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidParameter, match="not"):
        texts(llm, [schema], 0.0)
