"""Names to copy: people, cities, and invented words."""

import random

from demo.facts import COUNTRIES

NAMES = [
    "Tom",
    "Anna",
    "Ben",
    "Mia",
    "Leo",
    "Ella",
    "Max",
    "Nora",
    "Sam",
    "Ida",
    "Jack",
    "Lucy",
    "Omar",
    "Sara",
    "Ravi",
    "Maya",
    "Kenji",
    "Yuki",
    "Ali",
    "Leila",
    "Ivan",
    "Olga",
    "Pedro",
    "Rosa",
    "Hugo",
    "Clara",
    "Emil",
    "Freya",
    "Noah",
    "Ruth",
    "Alex",
    "Zoe",
    "Karl",
    "Eva",
    "Paul",
    "Jane",
    "Mark",
    "Amy",
    "Oscar",
    "Lily",
    "Finn",
    "Grace",
    "Adam",
    "Hanna",
    "Victor",
    "Julia",
    "Diego",
    "Elena",
    "Felix",
    "Stella",
]

CITIES = sorted(
    {capital for capital, _ in COUNTRIES.values()}
    | {
        "Boston",
        "Chicago",
        "Seattle",
        "Denver",
        "Dallas",
        "New York",
        "San Francisco",
        "Los Angeles",
        "Toronto",
        "Lyon",
        "Milan",
        "Turin",
        "Munich",
        "Hamburg",
        "Cologne",
        "Barcelona",
        "Porto",
        "Zurich",
        "Geneva",
        "Glasgow",
        "Manchester",
        "Liverpool",
        "Osaka",
        "Kyoto",
        "Shanghai",
        "Mumbai",
        "Sydney",
        "Melbourne",
        "Cape Town",
        "Lagos",
        "Dubai",
        "Istanbul",
        "Singapore",
        "Hong Kong",
        "Malmo",
        "Bergen",
        "Krakow",
        "Florence",
        "Naples",
        "Venice",
    }
)

_ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "ch",
    "cl",
    "dr",
    "fl",
    "gr",
    "kr",
    "pl",
    "sh",
    "st",
    "th",
    "tr",
]
_NUCLEI = ["a", "e", "i", "o", "u", "ai", "ea", "io", "ou"]
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "k", "nd", "rt"]


def invented_word(rng: random.Random) -> str:
    """A pronounceable lower-case word of two or three syllables."""
    syllables = rng.choice([2, 2, 3])
    parts = (
        rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(syllables)
    )
    return "".join(parts)


def invented_name(rng: random.Random) -> str:
    """An invented word, capitalised."""
    return invented_word(rng).capitalize()


def any_city(rng: random.Random) -> str:
    """A city, usually real and sometimes invented, so that names are copied and not recalled."""
    return rng.choice(CITIES) if rng.random() < 0.65 else invented_name(rng)
