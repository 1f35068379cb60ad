"""Phrasings that only the evaluation may use: whole templates that no training text contains."""

HELD_OUT: dict[str, list[str]] = {
    "capital": [
        "Would you tell me which city is the capital of {country}?",
        "I would like to know {country}'s capital city.",
        "Please name the city that is the capital of {country}.",
        "What is the capital city called in {country}?",
        "Quick one: the capital city of {country}, please.",
        "Remind me, what is the capital of {country} again?",
    ],
    "capital_of": [
        "Name the country that has {capital} as its capital.",
        "Would you know which country's capital is {capital}?",
    ],
    "continent": [
        "Could you say on which continent {country} is?",
        "Please tell me which continent {country} belongs to.",
    ],
    "symbol": [
        "Please write down the chemical symbol for {element}.",
        "Which chemical symbol does {element} have?",
        "What symbol do chemists use for {element}?",
    ],
    "symbol_of": [
        "Could you name the element whose symbol is {symbol}?",
        "If I see {symbol} in the periodic table, which element is it?",
    ],
    "atomic_number": [
        "Please say which atomic number {element} has.",
        "What number is {element} in the periodic table of elements?",
    ],
    "planet_order": [
        "Would you tell me which planet is the {ordinal} one from the Sun?",
        "Starting at the Sun, what is the {ordinal} planet?",
    ],
    "planet_place": ["What is the place of {planet} in the order of planets from the sun?"],
    "planet_title": ["Could you say which planet is the {title} in the Solar System?"],
    "sound": [
        "Could you tell me which sound a {animal} makes?",
        "What do you hear when a {animal} makes a sound?",
    ],
    "young": [
        "Please tell me what the young of a {animal} is called.",
        "Which name is used for a baby {animal}?",
    ],
    "legs": ["Please tell me how many legs a {animal} has got."],
    "colour": [
        "Please tell me the colour that {thing} has.",
        "Would you say what colour {thing} is?",
    ],
    "mix": ["Tell me which colour {a} and {b} make when mixed."],
    "opposite": [
        "Please name a word that is the opposite of {word}.",
        "Would you tell me what the opposite of {word} is?",
        "Which word is opposite to {word}?",
    ],
    "plural": [
        "Please tell me what the plural of {word} is.",
        "Which form does {word} take in the plural?",
    ],
    "month_after": ["Please tell me which month comes right after {month}."],
    "month_before": ["Could you name the month that comes before {month}?"],
    "month_days": ["Could you say how many days there are in {month}?"],
    "month_place": ["Would you tell me which month is the {ordinal} one of the year?"],
    "day_after": ["Could you name the day that comes after {day}?"],
    "day_before": ["Please tell me which day comes right before {day}."],
    "unit": [
        "Would you tell me how many {small} there are in {big}?",
        "Please say how many {small} make {big}.",
    ],
    "add": [
        "Please work out {a} plus {b} for me.",
        "Could you tell me what {a} + {b} is?",
        "Add {a} and {b} together, please.",
        "I want to know how much {a} plus {b} is.",
    ],
    "subtract": [
        "Please work out {a} minus {b} for me.",
        "Could you tell me what {a} - {b} is?",
        "What remains if I subtract {b} from {a}?",
    ],
    "multiply": [
        "Please work out {a} times {b} for me.",
        "Could you tell me what {a} x {b} is?",
    ],
    "glossary": [
        "Would you please explain what {term} is?",
        "What exactly is {term}?",
        "In simple words, what does {term} mean?",
        "Someone asked me about {term}. What should I say it is?",
        "I am new here. Please tell me what {term} is.",
    ],
}

HELD_OUT_FOLLOW_UPS: dict[str, list[str]] = {
    "capital": ["And what is it in {country}?", "Okay, and how about the one of {country}?"],
    "symbol": ["Good. And what about the one for {element}?"],
    "opposite": ["And what would it be for {word}?"],
    "plural": ["Okay, and what about the one of {word}?"],
    "add": ["And now what is {a} + {b}?"],
    "sound": ["And how about the sound of a {animal}?"],
    "glossary": ["Okay. And what about {term}, what is that?"],
}
