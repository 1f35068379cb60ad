"""Every single-turn skill as a sampler: `sample(kind, rng)` draws one `Item` of that kind.

An item fills the slots of the templates in `phrasings` and has exactly one right answer.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from demo import facts
from demo.glossary import ALIASES, GLOSSARY
from demo.people import CITIES, NAMES, invented_name
from demo.staged_random import stage_of
from demo.stories import TOPICS, story
from demo.writing import PROGRAMS, SMALLTALK, UNKNOWN_ANSWER, repeatable_text, unknown_slots


@dataclass(frozen=True)
class Item:
    """One fact: the slots of its question, its answer, and a one-word answer if it has one."""

    slots: dict[str, str] = field(default_factory=dict)
    answer: str = ""
    short: str | None = None


def sample(kind: str, rng: random.Random) -> Item:
    """Draw one item. Raises KeyError for an unknown kind."""
    return rng.choice(TABLES[kind]) if kind in TABLES else SAMPLERS[kind](rng)


def _tables() -> dict[str, list[Item]]:
    t: dict[str, list[Item]] = {}
    countries = [
        ({"country": c, "capital": cap}, c, cap, land) for c, (cap, land) in facts.COUNTRIES.items()
    ]
    t["capital"] = [Item(s, f"The capital of {c} is {cap}.", cap) for s, c, cap, _ in countries]
    t["capital_of"] = [Item(s, f"{cap} is the capital of {c}.", c) for s, c, cap, _ in countries]
    t["continent"] = [Item(s, f"{c} is in {land}.", land) for s, c, _, land in countries]
    t["json_country"] = [
        Item(s, json.dumps({"country": c, "capital": cap})) for s, c, cap, _ in countries
    ]
    elements = [
        ({"element": e, "symbol": sym}, e, sym, num) for e, (sym, num) in facts.ELEMENTS.items()
    ]
    t["symbol"] = [
        Item(s, f"The chemical symbol of {e} is {sym}.", sym) for s, e, sym, _ in elements
    ]
    t["symbol_of"] = [Item(s, f"{sym} is the symbol of {e}.", e) for s, e, sym, _ in elements]
    t["atomic_number"] = [
        Item(s, f"The atomic number of {e} is {num}.", str(num)) for s, e, _, num in elements
    ]
    t["json_element"] = [
        Item(s, json.dumps({"element": e, "symbol": sym, "number": num}))
        for s, e, sym, num in elements
    ]
    planets = [
        ({"planet": p, "ordinal": facts.ORDINALS[i], "n": str(i + 1)}, p, facts.ORDINALS[i])
        for i, p in enumerate(facts.PLANETS)
    ]
    t["planet_order"] = [Item(s, f"The {o} planet from the Sun is {p}.", p) for s, p, o in planets]
    t["planet_place"] = [Item(s, f"{p} is the {o} planet from the Sun.", o) for s, p, o in planets]
    t["planet_title"] = [
        Item({"title": w}, f"The {w} planet is {p}.", p) for w, p in facts.PLANET_TITLES.items()
    ]
    t["sound"] = [
        Item({"animal": a}, f"{an(a).capitalize()} says {x}.", x) for a, x in facts.SOUNDS.items()
    ]
    t["young"] = [
        Item({"animal": a}, f"A young {a} is called {an(y)}.", y) for a, y in facts.YOUNG.items()
    ]
    t["legs"] = [
        Item({"animal": a}, f"{an(a).capitalize()} has {n} legs.", n) for a, n in facts.LEGS.items()
    ]
    t["colour"] = [
        Item({"thing": x}, f"{x[0].upper()}{x[1:]} {verb} {c}.", c)
        for x, (verb, c) in facts.COLOURS.items()
    ]
    t["mix"] = [
        Item({"a": x, "b": y}, f"{' and '.join(sorted(pair)).capitalize()} make {c}.", c)
        for pair, c in facts.MIXES.items()
        for x, y in (pair, pair[::-1])
    ]
    t["opposite"] = [
        Item({"word": w}, f"The opposite of {w} is {o}.", o) for w, o in facts.opposites().items()
    ]
    t["plural"] = [
        Item({"word": w}, f"The plural of {w} is {p}.", p) for w, p in facts.PLURALS.items()
    ]
    months = list(facts.MONTHS)
    for kind, shift, word in (("month_after", 1, "after"), ("month_before", -1, "before")):
        t[kind] = [
            Item({"month": m}, f"The month {word} {m} is {months[(i + shift) % 12]}.")
            for i, m in enumerate(months)
        ]
    t["month_days"] = [
        Item({"month": m}, f"{m} has {d} days.", str(d)) for m, d in facts.MONTHS.items()
    ]
    t["month_place"] = [
        Item({"ordinal": o, "n": str(i + 1)}, f"The {o} month of the year is {months[i]}.")
        for i, o in enumerate(facts.ORDINALS)
    ]
    for kind, shift, word in (("day_after", 1, "after"), ("day_before", -1, "before")):
        t[kind] = [
            Item({"day": d}, f"The day {word} {d} is {facts.WEEKDAYS[(i + shift) % 7]}.")
            for i, d in enumerate(facts.WEEKDAYS)
        ]
    t["unit"] = [
        Item({"small": s, "big": b}, f"There are {n} {s} in {b}.", str(n))
        for (s, b), n in facts.UNITS.items()
    ]
    t["number_word"] = [
        Item({"n": str(i)}, f"{i} is written {w}.", w) for i, w in enumerate(facts.NUMBER_WORDS)
    ]
    t["glossary"] = [
        Item({"term": alias}, answer)
        for term, answer in GLOSSARY.items()
        for alias in ALIASES.get(term, [term])
    ]
    t["story"] = [Item({"topic": topic}, story(topic)) for topic in TOPICS]
    t["program"] = [Item({"task": task}, code) for task, code in PROGRAMS.items()]
    for kind, (answer, _, _) in SMALLTALK.items():
        t[kind] = [Item({}, answer)]
    return t


def _add(rng: random.Random) -> Item:
    top = 10 if stage_of(rng) else 15
    a, b = rng.randint(0, top), rng.randint(0, top)
    return Item({"a": str(a), "b": str(b)}, f"{a} + {b} = {a + b}", str(a + b))


def _subtract(rng: random.Random) -> Item:
    top_b, top_c = (10, 10) if stage_of(rng) else (12, 15)
    b, c = rng.randint(0, top_b), rng.randint(0, top_c)
    return Item({"a": str(b + c), "b": str(b)}, f"{b + c} - {b} = {c}", str(c))


def _multiply(rng: random.Random) -> Item:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    return Item({"a": str(a), "b": str(b)}, f"{a} * {b} = {a * b}", str(a * b))


def _larger(rng: random.Random) -> Item:
    a, b = rng.sample(range(21 if stage_of(rng) else 31), 2)
    big = max(a, b)
    return Item({"a": str(a), "b": str(b)}, f"{big} is larger than {min(a, b)}.", str(big))


def _parity(rng: random.Random) -> Item:
    n = rng.randint(0, 20 if stage_of(rng) else 30)
    word = "odd" if n % 2 else "even"
    return Item({"n": str(n)}, f"{n} is an {word} number.", word)


def _count(rng: random.Random) -> Item:
    a = rng.choice([1, 1, 1, rng.randint(0, 9)])
    b = a + rng.randint(2, 9)
    return Item({"a": str(a), "b": str(b)}, ", ".join(str(i) for i in range(a, b + 1)))


def _check_capital(rng: random.Random) -> Item:
    country, (capital, _) = rng.choice(list(facts.COUNTRIES.items()))
    if rng.random() < 0.5:
        said, answer = capital, f"Yes, the capital of {country} is {capital}."
    else:
        said = rng.choice([c for c, _ in facts.COUNTRIES.values() if c != capital])
        answer = f"No, the capital of {country} is {capital}."
    return Item({"country": country, "capital": said}, answer, answer.split(",")[0])


def _list(style: Callable[[list[str]], str]) -> Callable[[random.Random], Item]:
    def draw(rng: random.Random) -> Item:
        noun = rng.choice(list(facts.LISTS))
        n = rng.randint(2, 5)
        shown = facts.NUMBER_WORDS[n] if rng.random() < 0.6 else str(n)
        return Item({"noun": noun, "n": shown}, style(facts.LISTS[noun][:n]))

    return draw


def _person(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.75 else invented_name(rng)


def _json_age(rng: random.Random) -> Item:
    name, age = _person(rng), rng.randint(1, 99)
    return Item({"name": name, "age": str(age)}, json.dumps({"name": name, "age": age}))


def _json_city(rng: random.Random) -> Item:
    name, city = _person(rng), rng.choice(CITIES)
    return Item({"name": name, "city": city}, json.dumps({"name": name, "city": city}))


def _repeat(rng: random.Random) -> Item:
    text = repeatable_text(rng)
    return Item({"text": text}, text)


def _unknown(rng: random.Random) -> Item:
    return Item(unknown_slots(rng), UNKNOWN_ANSWER)


def an(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


SAMPLERS: dict[str, Callable[[random.Random], Item]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "larger": _larger,
    "parity": _parity,
    "count": _count,
    "check_capital": _check_capital,
    "list_comma": _list(lambda xs: ", ".join(xs)),
    "list_numbered": _list(lambda xs: "\n".join(f"{i}. {x}" for i, x in enumerate(xs, 1))),
    "list_bullet": _list(lambda xs: "\n".join(f"- {x}" for x in xs)),
    "list_json": _list(lambda xs: json.dumps(xs)),
    "json_age": _json_age,
    "json_city": _json_city,
    "repeat": _repeat,
    "unknown": _unknown,
}
TABLES: dict[str, list[Item]] = _tables()
