"""Questions with one right answer each, asked of a model before and after.

A file of JSON lines: ``{"messages": [...], "tools": [...]?, "expected": "..."}``, as
``tests/demo/heldout.jsonl``. An answer is right when it is the expected text, outer white space
apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.llm import LLM
from engine.types import SamplingParams
from tools.quantize.recipe import QuantizeError

_MAX_TOKENS = 160


class Question(NamedTuple):
    """One of them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    expected: str


def read_questions(path: Path) -> list[Question]:
    """All of a file.

    Raises:
        QuantizeError: a line is no question; says which.
        OSError: it cannot be read.
    """
    found: list[Question] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question = Question(entry["messages"], entry.get("tools"), entry["expected"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise QuantizeError(f"{path}: line {number} is no question with its answer") from None
        found.append(question)
    if not found:
        raise QuantizeError(f"{path}: holds no questions")
    return found


def num_right(model: Path, questions: list[Question]) -> int:
    """How many a model answers right, greedily; in float32, so that nothing but its weights counts.

    Raises:
        ModelLoadError: the model cannot be loaded.
        RequestError: a question cannot be put to it.
    """
    with LLM(model, dtype="float32", use_tqdm=False) as llm:
        return answers_right(llm, questions)


def answers_right(llm: LLM, questions: list[Question]) -> int:
    """The same of a model that is loaded. Raises RequestError."""
    sampling = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    prompts = [llm.encode_chat(asked.messages, tools=asked.tools) for asked in questions]
    results = llm.generate(prompts, sampling, use_tqdm=False)
    return sum(
        result.outputs[0].text.strip() == asked.expected.strip()
        for result, asked in zip(results, questions, strict=True)
    )
