"""A second set of reserved phrasings, written after the recipe was fixed and never used to tune it.

The first set (`reserved`) showed which categories to practise more. This one gives the unbiased
number that the card reports beside it.
"""

FRESH: dict[str, list[str]] = {
    "capital": [
        "Would you please say what the capital of {country} is?",
        "Let me know {country}'s capital, please.",
        "Which place is the capital of {country}?",
    ],
    "capital_of": ["I read about {capital}. Which country has it as its capital?"],
    "continent": ["I wonder which continent {country} lies in."],
    "symbol": ["Let me know the chemical symbol of {element}.", "How do chemists write {element}?"],
    "symbol_of": ["Let me know which element has the symbol {symbol}."],
    "atomic_number": ["Let me know what the atomic number of {element} is."],
    "planet_order": ["Let me know which planet is {ordinal} from the Sun."],
    "sound": ["I wonder what sound a {animal} makes."],
    "young": ["Let me know what we call a baby {animal}."],
    "legs": ["I wonder how many legs a {animal} has."],
    "colour": ["Let me know what colour {thing} is."],
    "opposite": ["Let me know the opposite of {word}.", "I am looking for the opposite of {word}."],
    "plural": ["Let me know the plural form of {word}."],
    "month_after": ["I wonder which month follows {month}."],
    "day_before": ["I wonder which day is before {day}."],
    "unit": ["Let me know how many {small} are in {big}."],
    "add": ["Let me know what {a} plus {b} makes.", "Would you add {a} and {b}?"],
    "subtract": ["Let me know what {a} minus {b} makes.", "Would you take {b} away from {a}?"],
    "multiply": ["Let me know what {a} times {b} makes."],
    "glossary": [
        "Let me know what {term} is.",
        "Would you describe {term} in one sentence?",
        "I wonder what {term} means.",
    ],
    "list_numbered": ["I would like a numbered list of {n} {noun}."],
    "list_json": ["I would like {n} {noun} as JSON."],
    "json_country": ["I would like JSON with the capital of {country}."],
    "larger": ["I wonder which is larger, {a} or {b}."],
    "story": ["I would like a short story about a {topic}."],
    "hello": ["Hello to you, Quire!"],
    "thanks": ["That was great, thank you!"],
    "who": ["I wonder who you are."],
}
