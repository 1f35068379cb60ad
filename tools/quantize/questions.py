"""Questions with one right answer each, put to a model before and after quantisation.

A file of JSON lines: ``{"messages": [...], "tools": [...]?, "expected": "..."}``, as
``tests/demo/heldout.jsonl``. An answer is right if it equals the expected text, ignoring outer
whitespace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import RequestError
from engine.llm import LLM
from engine.models.checkpoint import read_config
from engine.models.spec import DecoderSpec
from engine.offline.images import extract_media
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.types import SamplingParams
from tools.json_lines import numbered_lines
from tools.quantize.recipe import QuantizeError
from tools.quantize.texts import read_text

_MAX_TOKENS = 160


class Question(NamedTuple):
    """One question and its answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    expected: str


def read_questions(path: Path) -> list[Question]:
    """All questions of a file.

    Raises:
        QuantizeError: a line is not a question; names the line.
        OSError: it cannot be read.
    """
    found: list[Question] = []
    for number, line in numbered_lines(read_text(path)):
        question = _parse(line)
        if question is None:
            raise QuantizeError(f"{path}: line {number} is no question with its answer")
        found.append(question)
    if not found:
        raise QuantizeError(f"{path}: holds no questions")
    return found


def check_questions(model: Path, questions: list[Question]) -> None:
    """Check that a model can be asked, before long work whose end they come at.

    Raises:
        QuantizeError: it generates no text, its template does not take a question, or one does not
            fit into its context with an answer.
        ModelLoadError: its config or its tokenizer cannot be read.
    """
    spec = read_config(str(model)).spec
    if not isinstance(spec, DecoderSpec) or not spec.is_generative:
        raise QuantizeError(f"{model} generates no text, and answers no questions")
    template = ChatTemplate.from_dir(model, Tokenizer.from_dir(model))
    try:
        for number, asked in enumerate(questions, 1):
            messages, _ = extract_media(asked.messages)
            try:
                prompt = template.encode_chat_sync(messages, tools=asked.tools)
            except RequestError as error:
                raise QuantizeError(f"question {number}: {error}") from None
            if len(prompt) + _MAX_TOKENS > spec.max_context_len:
                raise QuantizeError(
                    f"question {number} has {len(prompt)} tokens, and an answer up to "
                    f"{_MAX_TOKENS}: the model's context is {spec.max_context_len}"
                )
    finally:
        template.close()


def count_correct(model: Path, questions: list[Question]) -> int:
    """How many questions a model answers correctly, greedily.

    The model runs in float32, so that only its weights matter.

    Raises:
        ModelLoadError: the model cannot be loaded.
        RequestError: the model cannot take a question.
    """
    with LLM(model, dtype="float32", use_tqdm=False) as llm:
        return count_correct_answers(llm, questions)


def count_correct_answers(llm: LLM, questions: list[Question]) -> int:
    """The same for a model that is already loaded. Raises RequestError."""
    sampling = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    prompts = [llm.encode_chat(asked.messages, tools=asked.tools) for asked in questions]
    results = llm.generate(prompts, sampling, use_tqdm=False)
    return sum(
        result.outputs[0].text.strip() == asked.expected.strip()
        for result, asked in zip(results, questions, strict=True)
    )


def _parse(line: str) -> Question | None:
    """The question in a line; None if it is none."""
    try:
        entry = json.loads(line)
        question = Question(entry["messages"], entry.get("tools"), entry["expected"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    messages, tools, expected = question
    is_whole = isinstance(expected, str) and isinstance(tools, list | None)
    is_whole = is_whole and isinstance(messages, list)
    return question if is_whole and all(isinstance(each, dict) for each in messages) else None
