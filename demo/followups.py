"""Short follow-ups that depend on the turn before: `And of Italy?`."""

FOLLOW_UPS: dict[str, list[str]] = {
    "capital": [
        "(And|and) (of|for|in) {country}?",
        "(And|What about|How about|and) {country}?",
        "(What is it|And what is it|What's it) for {country}?",
        "(Now|Next|Now do|Then) {country}(.|?)",
        "(The same|Same question) for {country}(.|?)",
        "And the capital of {country}?",
        "And {country}'s?",
    ],
    "continent": ["(And|What about|How about) {country}?", "(The same|Now) for {country}."],
    "symbol": [
        "(And|and) (of|for) {element}?",
        "(And|What about|How about|and) {element}?",
        "(Now|Next) {element}.",
        "(The same|Same question) for {element}(.|?)",
    ],
    "atomic_number": ["(And|And of|What about|How about) {element}?", "(Now|Next) {element}."],
    "sound": ["(And|What about|How about) (a|the) {animal}?", "(Now|Next|And now) a {animal}."],
    "young": ["(And|What about|How about) a (young |baby |){animal}?", "(Now|Next) a {animal}."],
    "legs": ["(And|What about|How about) a {animal}?"],
    "colour": ["(And|What about|How about|And of) {thing}?", "(Now|Next|The same for) {thing}."],
    "opposite": [
        "(And|and) of {word}?",
        "(And|What about|How about) {word}?",
        "(Now|Next) {word}.",
        "(The same|Same question) for {word}(.|?)",
    ],
    "plural": [
        "(And|and) of {word}?",
        "(And|What about|How about) {word}?",
        "(Now|Next) {word}.",
        "(The same|Same question) for {word}(.|?)",
    ],
    "month_after": ["(And|What about|How about) (after |){month}?"],
    "month_days": ["(And|What about|How about) {month}?", "(Now|Next) {month}."],
    "planet_order": ["(And|What about|How about) the {ordinal}( one|)?"],
    "add": ["(And|What about|Now|Next) {a} (+|plus) {b}(?|)"],
    "subtract": ["(And|What about|Now|Next) {a} (-|minus) {b}(?|)"],
    "multiply": ["(And|What about|Now|Next) {a} (*|times|x) {b}(?|)"],
    "glossary": [
        "(And|What about|How about) {term}?",
        "And what (is|does) {term}( mean|)?",
        "(Now|Next) (explain |){term}.",
    ],
}
