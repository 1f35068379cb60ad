"""Phrasings that join the corpus from stage 2 on, for questions with many wrong answers so far."""

TRAIN: dict[str, list[str]] = {
    "atomic_number": [
        "(What|Which) number in the periodic table (is|has) {element}?",
        "(Which|What) number does {element} have among the elements?",
        "In the periodic table, (which|what) number is {element}?",
    ],
    "symbol": ["Please (give|tell) me the symbol that stands for {element}."],
    "colour": [
        "(Tell me|Say) (which|what) colour {thing} (has|is).",
        "(Please|Can you) name the colour of {thing}(.|?)",
    ],
    "sound": [
        "(What|Which) sound do you hear from a {animal}?",
        "Listen to a {animal}: what is it?",
    ],
    "legs": ["(Please say|I want to know) how many legs a {animal} has."],
    "month_before": ["(Name|Say) the month (that is|just) before {month}."],
    "month_after": ["(Name|Say) the month (that is|just) after {month}."],
    "day_after": ["(Name|Say) the day (that is|just) after {day}."],
    "day_before": ["(Name|Say) the day (that is|just) before {day}."],
    "unit": ["(I want to know|Please tell me) how many {small} {big} has."],
    "check_capital": [
        "(Say|Tell me): is {capital} the capital of {country}?",
        "Is {capital} (truly|indeed|actually) the capital of {country}?",
        "(Please tell me|I wonder) (if|whether) {capital} is the capital of {country}.",
    ],
    "glossary": [
        "(A friend|My boss|My teacher) asked me (what {term} is|to explain {term}).",
        "I am a beginner. (What is|Explain) {term}(.|?)",
        "(Would|Could) you tell me what {term} is?",
        "(Please say|Tell me) in (simple|plain|a few) words what {term} is.",
    ],
    "story": [
        "(Have you got|Is there) a (short |)story about a {topic}?",
        "(I would like|Let me hear) (one|a) story about a {topic}(, please|).",
    ],
    "list_comma": ["(Please tell me|Name me|Can you say) {n} {noun}(.|)"],
    "list_numbered": ["(Please make|Put down) a numbered list of {n} {noun}."],
    "list_bullet": ["(Please make|Put down) {n} {noun} as bullet points."],
    "list_json": ["(Please write|Put down) {n} {noun} as a JSON array."],
    "json_element": ["(Write|Return) the facts (of|about|for) {element} as JSON."],
    "count": ["(Please say|Let me hear) the numbers from {a} to {b}."],
    "number_word": ["(Please write|Say) {n} as a word."],
    "parity": ["(Would you call|Do you call) {n} even or odd?"],
    "repeat": ["(Now|Please) say (after me|this): {text}", "Repeat this(:| please:) {text}"],
    "unknown": [
        "(Have you heard of|Do you know|Can you tell me about) {person}?",
        "(Tell me|I want to know) (who|how old) {person} is.",
        "(Name|Give me|I need) the capital of {place}.",
    ],
    "hello": [
        "(Hello|Hi|Hey) (all|everyone|there, Quire|my friend)(!|.)",
        "(Welcome|Welcome back)!",
    ],
    "morning": ["(Hi|Hello|Hey)(,|!) (a |)good morning( to you|)(!|.)"],
    "evening": ["(Hi|Hello|Hey)(,|!) (a |)good evening( to you|)(!|.)"],
    "how_are_you": ["(How have you been|Are you doing well|How was your day)(?| lately?)"],
    "thanks": ["(Okay|OK|Alright|Super|Lovely), (thanks|thank you|many thanks)( for that|)(!|.)"],
    "bye": ["(Okay|OK|Well), (bye|goodbye|see you|see you soon)(!|.)", "I am off, bye!"],
    "who": ["(Could|Can) you (tell me|say) (who|what) you are?", "Which model is (here|talking)?"],
    "can_do": ["(Please say|Say|I wonder) what you can do."],
    "sky": ["(What makes|How come) the sky (is |)blue?", "Why do we see a blue sky?"],
    "joke": ["(Please|Now) (tell|say) (me |)a joke."],
}

CLOSING: dict[str, list[str]] = {
    "capital": [
        "(A fast one|One more|A short one|Small question): (the |)capital of {country}(.|?)",
        "(Just quickly|In short): (what is |)(the capital|the capital city) of {country}(.|?)",
        "(What was|What is) the capital( city|) of {country} (once more|now|then)?",
        "(Help me|Say it once more|Tell me again): what is the capital of {country}?",
        "(Please give me|Give me|Please say) the city that is {country}'s capital.",
        "(Name|Please tell me) the city (which is|that is) the capital of {country}.",
        "(I would love|I would want) to know the capital( city|) of {country}.",
        "(How is|What is) the capital( city|) of {country} (called|named)?",
        "The (capital|capital city) of {country}, please(.|)",
    ],
    "check_capital": ["Is {capital} the capital of {country}, yes or no?"],
    "larger": ["(Say|Tell me), (which|what) is (larger|bigger), {a} or {b}?"],
    "colour": ["(Which|What) is the colour that {thing} has?"],
    "month_place": ["(Tell me|Say) which month is (the |){ordinal} in the year."],
    "unknown": ["(Please say|Say|Please give me) the capital( city|) of {place}."],
}

FOLLOW_UPS: dict[str, list[str]] = {
    kind: [f"(Good|Fine|Great|OK), and (of|for) {slot}?", f"And (now |then |)(of|for) {slot}?"]
    for kind, slot in {
        "capital": "{country}",
        "symbol": "{element}",
        "opposite": "{word}",
        "plural": "{word}",
        "glossary": "{term}",
    }.items()
} | {"sound": ["(And|What is) the sound of a {animal}?"], "add": ["(And then|And|So) {a} + {b}?"]}

SYSTEM: dict[str, list[str]] = {
    "upper": [
        "(Please answer|Answer) (all questions|everybody|always) in (upper case|capital letters).",
        "(Please write|Write) everything in (upper case|capital letters|uppercase).",
    ],
    "one_word": [
        "(Please answer|Answer) (all questions|every question|always) (with|in) one word.",
        "(Each|Every) answer (is|must be|has to be) (one word|a single word).",
    ],
    "pirate": ["(Please answer|Please speak|Sound|Please act) like a (real |true |)pirate."],
    "json": [
        "(Please answer|Answer) (all questions|every question|always) (in|as) JSON.",
        "(Each|Every) answer (is|must be) JSON.",
    ],
    "think": [
        "(Please think|Think) (well |hard |)before (answering|replying|each answer).",
        "Please (reason|think) first.",
    ],
}
