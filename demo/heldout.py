"""Writes the evaluation set: 300 prompts made from phrasings that no training text contains.

    python -m demo.heldout            # writes tests/demo/heldout.jsonl and fresh.jsonl

The facts are those of the training text; the wording is new. Each line is `{"id", "category",
"messages", "tools"?, "expected"}`.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from demo import conversations as talk
from demo import heldout_phrasings, skills, toolchats
from demo.fresh import FRESH
from demo.relations import sample
from demo.staged_random import StagedRandom
from demo.toolbox import FAMILIES

PATH = Path(__file__).parent.parent / "tests" / "demo" / "heldout.jsonl"
FRESH_PATH = PATH.with_name("fresh.jsonl")
SEED = 7
NUM_FRESH = 100

# category -> (the kinds it draws from, number of prompts)
FACTS: dict[str, tuple[list[str], int]] = {
    "capitals": (["capital"], 30),
    "capitals, reversed": (["capital_of"], 6),
    "continents": (["continent"], 6),
    "elements": (["symbol", "symbol", "symbol_of", "atomic_number"], 25),
    "planets": (["planet_order", "planet_place", "planet_title"], 8),
    "animals": (["sound", "young", "legs"], 15),
    "colours": (["colour", "colour", "colour", "mix"], 8),
    "opposites": (["opposite"], 15),
    "plurals": (["plural"], 9),
    "calendar": (
        ["month_after", "month_before", "month_days", "month_place", "day_after", "day_before"],
        10,
    ),
    "units": (["unit"], 8),
    "arithmetic": (["add", "add", "subtract", "multiply"], 26),
    "numbers": (["count", "number_word", "larger", "parity"], 10),
    "yes or no": (["check_capital"], 4),
    "glossary": (["glossary"], 24),
    "lists": (["list_comma", "list_numbered", "list_bullet", "list_json"], 8),
    "json": (["json_country", "json_element", "json_age", "json_city"], 10),
    "copying": (["repeat"], 3),
    "stories": (["story"], 4),
    "programs": (["program"], 2),
    "unknown": (["unknown"], 4),
    "small talk": (
        ["hello", "morning", "how_are_you", "thanks", "bye", "who", "can_do", "joke", "sky"],
        10,
    ),
}
NUM_STYLED, NUM_FOLLOW, NUM_CALLS, NUM_RESULTS, NUM_UNNEEDED, NUM_MEMORY = 12, 14, 14, 7, 4, 4
_ASK_NAME = "Can you still say what my name is?"


def build() -> list[dict]:
    """The evaluation set; every call returns the same one."""
    rng = StagedRandom.seeded(str(SEED), stage=1)
    entries: list[dict] = []
    for category, (kinds, count) in FACTS.items():
        entries += _unique(_facts(category, kinds, rng), count)
    entries += _unique(_styled(rng), NUM_STYLED)
    entries += _unique(_follow_ups(rng), NUM_FOLLOW)
    entries += _unique(_tool_calls(rng), NUM_CALLS)
    entries += _unique(_tool_results(rng), NUM_RESULTS)
    entries += _unique(_unneeded(rng), NUM_UNNEEDED)
    entries += _unique(_memory(rng), NUM_MEMORY)
    return [{"id": f"held-{i:03}"} | entry for i, entry in enumerate(entries)]


def build_fresh() -> list[dict]:
    """The second set: only single questions, from the phrasings of `fresh`."""
    rng = StagedRandom.seeded(f"fresh {SEED}", stage=1)
    entries = _unique(_fresh(rng), NUM_FRESH)
    return [{"id": f"fresh-{i:03}"} | entry for i, entry in enumerate(entries)]


def _fresh(rng: random.Random) -> Iterator[dict]:
    while True:
        for kind, templates in FRESH.items():
            for template in templates:
                item = sample(kind, rng)
                yield _entry(kind, [talk.user(talk.fill(template, item))], item.answer)


def _unique(source: Iterator[dict], count: int) -> list[dict]:
    seen: dict[str, dict] = {}
    while len(seen) < count:
        entry = next(source)
        seen.setdefault(json.dumps(entry["messages"]), entry)
    return list(seen.values())


def _entry(category: str, messages: list[dict], expected: str, tools: list | None = None) -> dict:
    entry = {"category": category, "messages": messages}
    if tools:
        entry["tools"] = [tool.schema for tool in tools]
    return entry | {"expected": expected}


def _asked(kind: str, item, rng: random.Random) -> dict:
    return talk.user(talk.fill(rng.choice(talk.HELD_OUT[kind]), item))


def _facts(category: str, kinds: list[str], rng: random.Random) -> Iterator[dict]:
    turn = 0
    while True:
        kind = kinds[turn % len(kinds)]
        templates = talk.HELD_OUT[kind]
        item = sample(kind, rng)
        text = talk.fill(templates[turn // len(kinds) % len(templates)], item)
        yield _entry(category, [talk.user(text)], item.answer)
        turn += 1


def _styled(rng: random.Random) -> Iterator[dict]:
    while True:
        for style, prompts in skills.SYSTEM_HELD_OUT.items():
            kind = rng.choice(["capital", "opposite", "capital"])
            item = sample(kind, rng)
            messages = [{"role": "system", "content": rng.choice(prompts)}, _asked(kind, item, rng)]
            yield _entry("styles", messages, talk.styled_answer(style, item, kind))


def _follow_ups(rng: random.Random) -> Iterator[dict]:
    while True:
        for kind, templates in heldout_phrasings.HELD_OUT_FOLLOW_UPS.items():
            first, second = sample(kind, rng), sample(kind, rng)
            messages = [
                talk.user(talk.question(kind, first, rng)),
                talk.assistant(first.answer),
                talk.user(talk.fill(rng.choice(templates), second)),
            ]
            yield _entry("follow-ups", messages, second.answer)


def _one_call(wanted: str, rng: random.Random) -> tuple[list, dict, list[dict]]:
    tools = toolchats.pick_tools(rng, wanted)
    tool = next(t for t in tools if t.family is FAMILIES[wanted])
    values = tool.family.draw(rng)
    slots = {k: v for k, v in values.items() if k != "args"}
    text = rng.choice(tool.family.held_out).format_map(slots)
    call = toolchats.call_message([(tool, values)], rng)
    return tools, values, [talk.user(text), call]


def _tool_calls(rng: random.Random) -> Iterator[dict]:
    while True:
        for wanted in FAMILIES:
            tools, _, (asked, call) = _one_call(wanted, rng)
            function = json.dumps(call["tool_calls"][0]["function"])
            yield _entry("tool calls", [asked], f"<tool_call>\n{function}\n</tool_call>", tools)


def _tool_results(rng: random.Random) -> Iterator[dict]:
    while True:
        wanted = toolchats.random_family(rng)
        tools, values, messages = _one_call(wanted, rng)
        shown, answer = FAMILIES[wanted].result(values, rng)
        text = shown if isinstance(shown, str) else json.dumps(shown)
        yield _entry("tool results", [*messages, {"role": "tool", "content": text}], answer, tools)


def _unneeded(rng: random.Random) -> Iterator[dict]:
    while True:
        kind = rng.choice(["capital", "opposite", "glossary", "plural"])
        item = sample(kind, rng)
        tools = toolchats.pick_tools(rng, None)
        yield _entry("tools not needed", [_asked(kind, item, rng)], item.answer, tools)


def _memory(rng: random.Random) -> Iterator[dict]:
    while True:
        name = rng.choice(talk.NAMES)
        messages = [talk.user(f"My name is {name}."), talk.assistant(f"Nice to meet you, {name}!")]
        messages += talk.make_turns(rng, rng.randint(0, 3))
        yield _entry("memory", [*messages, talk.user(_ASK_NAME)], f"Your name is {name}.")


def main() -> None:
    PATH.parent.mkdir(parents=True, exist_ok=True)
    for path, entries in ((PATH, build()), (FRESH_PATH, build_fresh())):
        lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
