"""Questions with one right answer each, put to a model before and after quantisation.

A file of JSON lines: ``{"messages": [...], "tools": [...]?, "expected": "..."}``, as
``tests/demo/heldout.jsonl``. An answer is right if it equals the expected text, ignoring outer
whitespace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.llm import LLM
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
        try:
            entry = json.loads(line)
            question = Question(entry["messages"], entry.get("tools"), entry["expected"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise QuantizeError(f"{path}: line {number} is no question with its answer") from None
        found.append(question)
    if not found:
        raise QuantizeError(f"{path}: holds no questions")
    return found


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
