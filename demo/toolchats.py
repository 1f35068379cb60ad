"""Conversations with tools: calls, parallel calls, results, errors, and unneeded tools."""

import json
import random

from demo.conversations import (
    STYLED_KINDS,
    assistant,
    expand_any,
    plain_system,
    question,
    user,
)
from demo.relations import sample
from demo.staged_random import stage_of
from demo.toolbox import FAMILIES, Tool, ToolFamily, make_tool

NO_TOOL_ANSWER = "I cannot look that up without a tool."
_UNNEEDED = [k for k in STYLED_KINDS if k not in ("add", "subtract")]
_UNNEEDED += ["glossary", "hello", "who", "thanks", "how_are_you"]
# These two answer the same questions, so no list of tools has both.
_CONFLICTING = {"add": "calculator", "calculator": "add"}
# Number of other tools in the list, by stage: short lists give more calls per token.
_NUM_OTHERS = [
    [0, 0, 1, 1, 2, 3],
    [0, 0, 1, 1, 2, 3],
    [0, 0, 0, 1, 1, 2],
    [0, 0, 0, 0, 1, 2],
    [0, 0, 0, 0, 1, 2],
]
# Relative frequency of the families in questions; well-known tools are the most frequent.
_FAMILY_WEIGHTS = {
    "weather": 6, "time": 3, "add": 2.5, "calculator": 2.5, "exchange": 3, "timer": 1,
    "search": 1.2, "message": 1.2, "stock": 1.2, "translate": 1.2,
}  # fmt: skip


def random_family(rng: random.Random) -> str:
    return rng.choices(list(_FAMILY_WEIGHTS), list(_FAMILY_WEIGHTS.values()))[0]


def pick_tools(rng: random.Random, wanted: str | None, without: str | None = None) -> list[Tool]:
    """One to four tools in random order, including `wanted` and excluding `without`."""
    names = [n for n in FAMILIES if n not in (wanted, without, _CONFLICTING.get(wanted or ""))]
    if without in _CONFLICTING:
        names = [n for n in names if n != _CONFLICTING[without]]
    rng.shuffle(names)
    sizes = _NUM_OTHERS[stage_of(rng)]
    chosen = ([wanted] if wanted else []) + names[: rng.choice(sizes)]
    if not chosen:
        chosen = names[:1]
    if "add" in chosen and "calculator" in chosen:
        chosen.remove("add")
    rng.shuffle(chosen)
    return [make_tool(FAMILIES[n], rng) for n in chosen]


def call_message(calls: list[tuple[Tool, dict]], rng: random.Random) -> dict:
    """An assistant turn with tool calls, in the OpenAI format; the content is empty."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{rng.randrange(16**8):08x}",
                "type": "function",
                "function": {"name": tool.name, "arguments": tool.arguments(values)},
            }
            for tool, values in calls
        ],
    }


def tool_conversation(rng: random.Random) -> dict:
    """One to three questions that need tools, with calls, results and closing answers."""
    wanted = random_family(rng)
    tools = pick_tools(rng, wanted)
    messages = plain_system(rng, 0.3)
    for turn in range(rng.choice([1, 1, 2, 3])):
        if turn and rng.random() < 0.35:
            messages += _unneeded(rng)
            continue
        tool = next(t for t in tools if t.family is FAMILIES[wanted])
        if turn and rng.random() < 0.5:
            tool = rng.choice(tools)
        follow = tool.family.follow_ups and _last_call(messages[-3:]) == tool.name
        messages += _round(tool, rng, bool(follow and rng.random() < 0.7))
    return {"messages": messages, "tools": [t.schema for t in tools]}


def parallel_tool_conversation(rng: random.Random) -> dict:
    """Two calls in one turn, two results, one answer."""
    wanted = rng.choice(["weather", "weather", "time", "stock"])
    tools = pick_tools(rng, wanted)
    tool = next(t for t in tools if t.family is FAMILIES[wanted])
    family = tool.family
    first, second = family.draw(rng), family.draw(rng)
    key = "symbol" if wanted == "stock" else "city"
    text = expand_any(list(PARALLEL[wanted]), rng).format(a=first[key], b=second[key])
    calls = call_message([(tool, first), (tool, second)], rng)
    results = [family.result(v, rng) for v in (first, second)]
    messages = [user(add_light_noise(text, rng)), calls]
    messages += [_tool_message(shown) for shown, _ in results]
    messages.append(assistant(" ".join(answer for _, answer in results)))
    return {"messages": messages, "tools": [t.schema for t in tools]}


def no_tool_conversation(rng: random.Random) -> dict:
    """A conversation with tools whose questions are about facts, or match no tool."""
    if rng.random() < 0.4:
        missing = rng.choice(["weather", "time", "exchange", "stock"])
        tools = pick_tools(rng, None, without=missing) if rng.random() < 0.6 else []
        family = FAMILIES[missing]
        messages = [user(ask(family, family.draw(rng), rng)), assistant(NO_TOOL_ANSWER)]
    else:
        tools = pick_tools(rng, None)
        messages = []
        for _ in range(rng.choice([1, 1, 2])):
            messages += _unneeded(rng)
    return {"messages": plain_system(rng, 0.2) + messages, "tools": [t.schema for t in tools]}


PARALLEL = {
    "weather": (
        "(What is|What's|How is) the weather in {a} and (in |){b}?",
        "(Tell me|Check|Compare) the weather (in|for) {a} and {b}(.|)",
        "(Is it|Where is it) (warmer|colder) in {a} or (in |){b}?",
    ),
    "time": (
        "What time is it in {a} and (in |){b}?",
        "(What is|Tell me|Check) the time in {a} and {b}(?|.)",
    ),
    "stock": (
        "(What are|Check|Tell me) the prices of {a} and {b}(.|?)",
        "(What is|Get) the stock price of {a} and (of |){b}(?|.)",
    ),
}


def ask(family: ToolFamily, values: dict, rng: random.Random, follow: bool = False) -> str:
    """A question that needs the tool."""
    templates = family.follow_ups if follow else family.ask
    slots = {k: v for k, v in values.items() if k != "args"}
    return add_light_noise(expand_any(list(templates), rng).format_map(slots), rng)


def add_light_noise(text: str, rng: random.Random) -> str:
    """Add noise that leaves the values to copy unchanged: greetings and missing punctuation."""
    if rng.random() < 0.1:
        text = rng.choice(["Hi! ", "Hello! ", "Please: ", "Hey, "]) + text
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    return text.rstrip("?") if rng.random() < 0.1 else text


def _round(tool: Tool, rng: random.Random, follow: bool) -> list[dict]:
    values = tool.family.draw(rng)
    messages = [user(ask(tool.family, values, rng, follow)), call_message([(tool, values)], rng)]
    if rng.random() < 0.08:
        reason = rng.choice(["not found", "timeout", "no network", "bad request", "access denied"])
        shown, answer = {"error": reason}, f"The tool failed: {reason}."
    else:
        shown, answer = tool.family.result(values, rng)
    return [*messages, _tool_message(shown), assistant(answer)]


def _unneeded(rng: random.Random) -> list[dict]:
    kind = rng.choice(_UNNEEDED)
    item = sample(kind, rng)
    return [user(question(kind, item, rng)), assistant(item.answer)]


def _tool_message(shown: object) -> dict:

    text = shown if isinstance(shown, str) else json.dumps(shown)
    return {"role": "tool", "content": text}


def _last_call(messages: list[dict]) -> str | None:
    for message in reversed(messages):
        if message.get("tool_calls"):
            return message["tool_calls"][0]["function"]["name"]
    return None
