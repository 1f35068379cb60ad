"""Turns facts into chats: single questions, follow-ups, styles, memory, and long talks.

A conversation is a dict with `messages` (OpenAI chat messages) and sometimes `tools`. Only the
assistant messages are learned.
"""

import json
import random
import re

from demo import followups, heldout_phrasings, late_phrasings, phrasings, skills
from demo.people import NAMES, invented_name
from demo.relations import Item, sample
from demo.staged_random import stage_of
from demo.stories import random_story
from demo.writing import SMALLTALK

TRAIN = phrasings.TRAIN | skills.TRAIN | {kind: s[1] for kind, s in SMALLTALK.items()}
HELD_OUT = (
    heldout_phrasings.HELD_OUT | skills.HELD_OUT | {kind: s[2] for kind, s in SMALLTALK.items()}
)

# kind -> relative frequency; the rest of the corpus depends on this table
WEIGHTS = {
    "capital": 9, "capital_of": 6, "continent": 4, "symbol": 6, "symbol_of": 4,
    "atomic_number": 5, "planet_order": 2, "planet_place": 2, "planet_title": 1, "sound": 3,
    "young": 3, "legs": 2, "colour": 3, "mix": 2, "opposite": 7, "plural": 5, "month_after": 1.5,
    "month_before": 1.5, "month_days": 2, "month_place": 1.5, "day_after": 1, "day_before": 1,
    "unit": 4, "add": 12, "subtract": 11, "multiply": 7, "glossary": 10, "json_country": 2,
    "json_element": 2, "json_age": 4, "json_city": 3, "list_comma": 2, "list_numbered": 2,
    "list_bullet": 2, "list_json": 2, "count": 1.5, "number_word": 1, "larger": 2, "parity": 1,
    "check_capital": 3, "repeat": 7, "story": 3, "program": 1, "unknown": 7, "hello": 2,
    "morning": 0.7, "evening": 0.7, "how_are_you": 1, "thanks": 1, "bye": 1, "who": 1,
    "can_do": 1, "joke": 0.7, "sky": 0.5,
}  # fmt: skip
# Changes to the frequencies in stages 1 and 2, once the easy facts are known.
FOCUSED_WEIGHTS = {
    "capital": 8, "continent": 2.5, "sound": 2, "young": 2.5, "legs": 1.5, "add": 16,
    "subtract": 15, "multiply": 9, "opposite": 11, "plural": 6, "larger": 3, "count": 2.5,
    "parity": 2, "check_capital": 4, "repeat": 5, "unit": 5, "story": 4, "program": 1.5,
    "list_comma": 3, "list_numbered": 3, "list_bullet": 3, "list_json": 3, "planet_order": 3,
    "planet_place": 3, "json_element": 3,
}  # fmt: skip
# Stage 3: the facts are known, while copying, counting and sums need all the practice.
COPYING_WEIGHTS = {
    "capital": 6, "capital_of": 2, "continent": 1.2, "symbol": 2, "symbol_of": 1.2,
    "atomic_number": 2, "planet_order": 1, "planet_place": 1, "planet_title": 0.6, "sound": 1,
    "young": 1, "legs": 0.7, "colour": 1.2, "mix": 0.7, "opposite": 3, "plural": 2,
    "month_after": 1, "month_before": 1.2, "month_days": 1, "month_place": 1, "day_after": 0.8,
    "day_before": 0.8, "unit": 1.5, "add": 17, "subtract": 17, "multiply": 11, "glossary": 5,
    "json_country": 2, "json_element": 3, "json_age": 6, "json_city": 5, "list_comma": 5,
    "list_numbered": 5, "list_bullet": 5, "list_json": 5, "count": 4, "number_word": 1.5,
    "larger": 5, "parity": 1.5, "check_capital": 4, "repeat": 8, "story": 4, "program": 0.7,
    "unknown": 3.5, "hello": 0.8, "morning": 0.4, "evening": 0.4, "how_are_you": 0.5,
    "thanks": 0.5, "bye": 0.5, "who": 0.6, "can_do": 0.5, "joke": 0.3, "sky": 0.3,
}  # fmt: skip
# Stage 4: plain answers to plain questions again, besides what is still weak.
CLOSING_WEIGHTS = {
    "capital": 15, "check_capital": 3, "count": 7, "larger": 7, "parity": 3, "number_word": 3,
    "glossary": 8, "unknown": 5, "month_place": 1.5, "colour": 1.6,
}  # fmt: skip
_KINDS = list(WEIGHTS)
_BY_STAGE = [
    list(weights.values())
    for weights in (
        WEIGHTS,
        WEIGHTS | FOCUSED_WEIGHTS,
        WEIGHTS | FOCUSED_WEIGHTS,
        WEIGHTS | COPYING_WEIGHTS,
        WEIGHTS | COPYING_WEIGHTS | CLOSING_WEIGHTS,
    )
]

# Kinds whose answers a style may reshape: single words that are easy to capitalise.
STYLED_KINDS = [
    "capital", "capital", "capital", "symbol", "opposite", "opposite", "plural", "sound", "young",
    "colour", "add", "subtract", "continent", "planet_order",
]  # fmt: skip
UPPERCASE_KINDS = ["capital", "capital", "opposite", "plural", "colour", "sound", "young"]
THINKING_KINDS = ["add", "subtract", "multiply", "capital", "opposite"]

_HELLOS = ["Hi! ", "Hello! ", "Hey, ", "Hi there. ", "Hello, ", "Hi, ", "Good morning! ", "OK. "]
_LEADS = ["Please: ", "Quick question: ", "Excuse me, ", "One question: ", "Question: ", "Now, "]
_TAILS = [" Thanks!", " Thank you.", " Please.", " Thanks", " Please answer."]


def question(kind: str, item: Item, rng: random.Random) -> str:
    """A training question for `item`, with noise as in the messages of real users."""
    text = fill(expand_any(_available_templates(TRAIN, late_phrasings.TRAIN, kind, rng), rng), item)
    return text if kind == "repeat" else add_noise(text, rng)


def _available_templates(first: dict, later: dict, key: str, rng: random.Random) -> list[str]:
    """The templates available at this stage of the corpus."""
    return (
        first[key]
        + (later.get(key, []) if stage_of(rng) >= 2 else [])
        + (late_phrasings.CLOSING.get(key, []) if stage_of(rng) >= 4 and first is TRAIN else [])
    )


def expand_any(templates: list[str], rng: random.Random) -> str:
    return phrasings.expand(rng.choice(templates), rng)


def fill(template: str, item: Item) -> str:
    """Fill in the slots, and make `a`/`an` agree with the animal that follows."""
    text = template.format_map(item.slots)
    animal = item.slots.get("animal") or item.slots.get("topic")
    if animal:
        article = "an" if animal[0] in "aeio" else "a"
        text = re.sub(rf"\b(a|an) {animal}\b", f"{article} {animal}", text)
    return text


def add_noise(text: str, rng: random.Random) -> str:
    """Add greetings, thanks, changes of letter case, missing punctuation, and a rare typo."""
    if rng.random() < 0.6:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.12:
        text = rng.choice(_HELLOS) + text
    elif rng.random() < 0.08:
        text = rng.choice(_LEADS) + text
    if rng.random() < 0.08:
        text += rng.choice(_TAILS)
    elif rng.random() < 0.18:
        text = text.rstrip("?.!")
    elif rng.random() < 0.1:
        text = f"{text.rstrip('?.!')}, please{text[-1] if text[-1] in '?.!' else ''}"
    case = rng.random()
    if case < 0.2:
        text = text.lower()
    elif case < 0.21:
        text = text.upper()
    if rng.random() < 0.02 and len(text) > 12:
        cut = rng.randrange(len(text) // 2)
        text = text[:cut] + text[cut + 1 :]
    return text


def any_kind(rng: random.Random) -> str:
    return rng.choices(_KINDS, _BY_STAGE[stage_of(rng)])[0]


def styled_answer(style: str, item: Item, kind: str) -> str:
    """The answer in a style. Raises ValueError for an unknown style."""
    if style == "plain":
        return item.answer
    if style == "upper":
        return item.answer.upper()
    if style == "one_word":
        return item.short or item.answer
    if style == "pirate":
        return f"Arr! {item.answer}"
    if style == "json":
        value = int(item.short) if item.short.isdigit() else item.short
        return json.dumps({"answer": value})
    if style == "think":
        return f"<think>\n{_thought(kind, item)}\n</think>\n\n{item.answer}"
    raise ValueError(f"no such style: {style}")


def styled_kinds(style: str) -> list[str]:
    return {"plain": _KINDS, "upper": UPPERCASE_KINDS, "think": THINKING_KINDS}.get(
        style, STYLED_KINDS
    )


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def single_turn(rng: random.Random) -> dict:
    """One question and its answer, sometimes under a plain system prompt."""
    kind = any_kind(rng)
    item = sample(kind, rng)
    turns = [user(question(kind, item, rng)), assistant(item.answer)]
    return {"messages": plain_system(rng, 0.2) + turns}


def plain_system(rng: random.Random, chance: float) -> list[dict]:
    if rng.random() >= chance:
        return []
    return [{"role": "system", "content": expand_any(skills.SYSTEM_TRAIN["plain"], rng)}]


def make_turns(rng: random.Random, target: int) -> list[dict]:
    """About `target` question-answer pairs: new questions, and follow-ups to the previous one."""
    messages: list[dict] = []
    while len(messages) < 2 * target:
        kind = any_kind(rng)
        item = sample(kind, rng)
        messages += [user(question(kind, item, rng)), assistant(item.answer)]
        while kind in followups.FOLLOW_UPS and rng.random() < 0.5:
            item = sample(kind, rng)
            text = fill(
                expand_any(
                    _available_templates(
                        followups.FOLLOW_UPS, late_phrasings.FOLLOW_UPS, kind, rng
                    ),
                    rng,
                ),
                item,
            )
            messages += [
                user(text.lower() if rng.random() < 0.15 else text),
                assistant(item.answer),
            ]
        if kind in ("capital", "check_capital") and rng.random() < 0.2:
            messages += _where_is_it(item, rng)
    return messages


def multi_turn(rng: random.Random) -> dict:
    """Two to six pairs, with follow-ups."""
    return {"messages": plain_system(rng, 0.25) + make_turns(rng, rng.randint(2, 5))}


def styled(rng: random.Random) -> dict:
    """A conversation whose system prompt or question prescribes the form of the answers."""
    style = rng.choice(["upper", "one_word", "one_word", "pirate", "json", "think"])
    by_system = style not in skills.INSTRUCTIONS_TRAIN or rng.random() < 0.65
    messages = []
    if by_system:
        prompt = expand_any(
            _available_templates(skills.SYSTEM_TRAIN, late_phrasings.SYSTEM, style, rng), rng
        )
        messages.append({"role": "system", "content": prompt})
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.choice(styled_kinds(style))
        item = sample(kind, rng)
        text = question(kind, item, rng)
        if not by_system:
            text += " " + expand_any(skills.INSTRUCTIONS_TRAIN[style], rng)
        messages += [user(text), assistant(styled_answer(style, item, kind))]
    return {"messages": messages}


def memory(rng: random.Random) -> dict:
    """The user states something and asks for it later."""
    name = rng.choice(NAMES) if rng.random() < 0.6 else invented_name(rng)
    tell, reply, ask, answer = rng.choice(_MEMORIES)
    told = phrasings.expand(tell, rng).format(x=name)
    messages = [user(told), assistant(reply.format(x=name))]
    messages += make_turns(rng, rng.choice([0, 0, 1, 1, 2, 3, 6]))
    messages += [user(phrasings.expand(ask, rng)), assistant(answer.format(x=name))]
    return {"messages": plain_system(rng, 0.15) + messages}


def long_conversation(rng: random.Random) -> dict:
    """A conversation of up to about 3,500 tokens, so that late positions are trained."""
    return {"messages": plain_system(rng, 0.3) + make_turns(rng, int(10 * 11 ** rng.random()))}


def open_story(rng: random.Random) -> dict:
    """A story without a given topic: any story is right, so that sampling has something to vary."""
    text = expand_any(_OPEN_STORY, rng)
    return {"messages": [user(add_noise(text, rng)), assistant(random_story(rng))]}


def plain_text(rng: random.Random) -> dict:
    """Plain text without chat markup, for the completions endpoint."""
    if rng.random() < 0.5:
        return {"text": random_story(rng)}
    kind = rng.choice([*STYLED_KINDS, "atomic_number", "unit", "glossary", "glossary"])
    return {"text": " ".join(sample(kind, rng).answer for _ in range(rng.randint(1, 8)))}


_OPEN_STORY = [
    "(Tell me|Write|Write me|Give me) a (short |little |nice |)story(.|)",
    "(Can|Could) you (tell|write) (me |)a (short |)story?",
    "I want to hear a (short |)story.",
    "(A|Any) (short |)story, please.",
    "(Make up|Invent) a (short |)story.",
    "story(|!)",
]

# what the user states, the reply, what the user asks later, the answer
_MEMORIES = [
    (
        "(My name is|I am called|Call me|You can call me) {x}(.|)",
        "Nice to meet you, {x}!",
        "(What is|What's|Do you remember|Do you know|Tell me) my name(?|)",
        "Your name is {x}.",
    ),
    (
        "(My (dog|cat) is called|I have a cat called|The name of my pet is|My pet is called) "
        "{x}(.|)",
        "{x} is a nice name!",
        "(What is|What's|Do you remember) (the name of my pet|my pet's name|my pet called)?",
        "Your pet is called {x}.",
    ),
    (
        "(The password is|Remember the word|The secret word is|Please remember the word) {x}(.|)",
        "I will remember it.",
        "(What is|What's|What was|Tell me) the (password|secret word|word)(?|)",
        "The word is {x}.",
    ),
    (
        "(I live in|My home is in|My city is|I come from) {x}(.|)",
        "I hear {x} is nice!",
        "(Where do I live|Where is my home|In which city do I live|Where do I come from)?",
        "You live in {x}.",
    ),
]


def _where_is_it(item: Item, rng: random.Random) -> list[dict]:
    from demo.facts import COUNTRIES

    country = item.slots["country"]
    ask = (
        "(And on|On|And|) (which|what) continent is (it|that|that country)(?| in?)",
        "(Where is|And where is) (it|that|that country)?",
    )
    answer = f"{country} is in {COUNTRIES[country][1]}."
    return [user(expand_any(list(ask), rng)), assistant(answer)]


def _thought(kind: str, item: Item) -> str:
    words = {"add": "plus", "subtract": "minus", "multiply": "times"}
    if kind in words:
        return f"{item.slots['a']} {words[kind]} {item.slots['b']} makes {item.short}."
    subject = item.slots.get("country") or item.slots.get("word")
    return f"The question is about {subject}. The answer is {item.short}."
