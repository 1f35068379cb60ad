"""Small talk, tiny programs, texts to repeat, and questions that the model cannot answer."""

import random

from demo.people import NAMES, invented_name, invented_word

UNKNOWN_ANSWER = "I am a very small model and do not know that."

# kind -> (answer, training phrasings, reserved phrasings)
SMALLTALK: dict[str, tuple[str, list[str], list[str]]] = {
    "hello": (
        "Hello! How can I help you?",
        [
            "(Hello|Hi|Hey|Hello there|Hi there|Greetings|Hey there|Howdy)(!|.||)",
            "(Hello|Hi|Hey) (Quire|friend|assistant|bot|model)(!|.|)",
            "(Hello|Hi), (nice to meet you|I am here|I am new here)(!|.)",
            "(Hi|Hello|Hey)! (Can|Could) (you|I) (help me|ask something|ask you something)?",
            "(Is anybody|Is anyone|Are you) there?",
        ],
        ["Hello and welcome!", "Hi there, friend!"],
    ),
    "morning": (
        "Good morning! How can I help you?",
        [
            "(Good morning|Morning)(!|.|, Quire!| to you!|, friend.|)",
            "I wish you a good morning(!|.)",
        ],
        ["Hello and good morning!"],
    ),
    "evening": (
        "Good evening! How can I help you?",
        [
            "(Good evening|Evening)(!|.|, Quire!| to you!|, friend.|)",
            "I wish you a good evening(!|.)",
        ],
        ["Hello and good evening!"],
    ),
    "how_are_you": (
        "I am fine, thank you. How can I help you?",
        [
            "(How are you|How are you doing|How do you do)( today| now|)?",
            "(Hi|Hello|Hey)(!|,) (how are you|how are you doing)( today|)?",
            "(How is it going|How's it going|What's up|How do you feel)( today|)?",
            "(Are you|Is everything) (well|fine|okay)?",
        ],
        ["Good day, how are you doing?", "How have you been today?"],
    ),
    "thanks": (
        "You are welcome!",
        [
            "(Thanks|Thank you|Thanks a lot|Many thanks|Thank you so much|Thx)(!|.|)",
            "(Great|Good|Perfect|Nice|Cool), (thanks|thank you)(!|.)",
            "(Thank you|Thanks) (for your help|for the answer|very much)(!|.)",
            "That (helps|was helpful), (thanks|thank you)(!|.)",
        ],
        ["Okay, thank you for the help!", "Wonderful, thanks a lot!"],
    ),
    "bye": (
        "Goodbye! Have a nice day.",
        [
            "(Bye|Goodbye|Bye bye|See you|See you later|Farewell|Good night)(!|.|)",
            "(I have to go|I must go|That is all)(.|, bye!|. Goodbye!)",
            "(Thanks|Thank you), (bye|goodbye)(!|.)",
        ],
        ["Okay, goodbye for now!", "I am leaving now, see you!"],
    ),
    "who": (
        "I am the demo model of Quire, a very small language model.",
        [
            "(Who|What) are you?",
            "(What is|What's) your name?",
            "(Tell me|Say) (who|what) you are.",
            "(Are you|Is this) (a human|a robot|a bot|an AI|ChatGPT|a person)?",
            "(Which|What) (language |)model (are you|is this)?",
            "(Introduce yourself|Tell me about yourself)(.|)",
            "(Who|Whom) am I (talking|speaking|chatting) (to|with)?",
            "What should I call you?",
        ],
        ["Would you tell me who you are?", "Which model am I talking to?"],
    ),
    "can_do": (
        "I can answer simple questions, do small sums, write lists and JSON, call tools and tell "
        "short stories.",
        [
            "What can you do( for me|)?",
            "(How|With what) can you help( me|)?",
            "(What|Which) (things|tasks) can you do?",
            "(Tell me|Show me) what you can do.",
            "(What are|List) your (skills|abilities)(?|.)",
            "What (are you good at|do you know|should I ask you|can I ask you)?",
            "Help(!|.|)",
        ],
        ["Please tell me what things you can do."],
    ),
    "joke": (
        "Why did the token cross the road? To get to the next block!",
        [
            "(Tell|Give) me a (joke|funny joke|short joke).",
            "(Do you know|Can you tell me|Could you tell) a (good |)joke?",
            "(Make me laugh|Say something funny|joke please)(.|!|)",
            "I want to hear a joke.",
        ],
        ["Please tell me one good joke."],
    ),
    "sky": (
        "The sky is blue because air scatters blue light more than red light.",
        ["Why is the sky blue?", "(Explain|Tell me|Do you know) why the sky is blue(.|?)"],
        ["What is the reason that the sky is blue?"],
    ),
}

PROGRAMS = {
    "adds two numbers": "```python\ndef add(a, b):\n    return a + b\n```",
    "multiplies two numbers": "```python\ndef multiply(a, b):\n    return a * b\n```",
    "says hello": '```python\nprint("Hello!")\n```',
    "checks if a number is even": "```python\ndef is_even(n):\n    return n % 2 == 0\n```",
    "reverses a string": "```python\ndef reverse(text):\n    return text[::-1]\n```",
    "counts to ten": "```python\nfor i in range(1, 11):\n    print(i)\n```",
}

_WORDS = [
    "red",
    "blue",
    "green",
    "apple",
    "banana",
    "river",
    "mountain",
    "happy",
    "quiet",
    "window",
    "garden",
    "music",
    "paper",
    "stone",
    "winter",
    "summer",
    "cat",
    "dog",
    "bird",
    "house",
    "light",
    "water",
    "fire",
    "earth",
    "moon",
    "star",
    "table",
    "chair",
    "book",
]


def repeatable_text(rng: random.Random) -> str:
    """A few words to repeat exactly: known words, names, numbers and invented words."""
    words = [
        rng.choice([rng.choice(_WORDS), rng.choice(_WORDS), invented_word(rng), rng.choice(NAMES)])
        for _ in range(rng.randint(1, 6))
    ]
    if rng.random() < 0.2:
        words.append(str(rng.randint(0, 999)))
    return " ".join(words)


def unknown_slots(rng: random.Random) -> dict[str, str]:
    """Slots for questions that the model must refuse: invented places, large numbers."""
    return {
        "place": invented_name(rng) + rng.choice(["", "ia", "land", "stan"]),
        "thing": invented_word(rng),
        "person": f"{rng.choice(NAMES)} {invented_name(rng)}",
        "a": str(rng.randint(101, 99999)),
        "b": str(rng.randint(101, 99999)),
        "year": str(rng.randint(1100, 2090)),
    }
