"""Short stories from a small grammar: one fixed story per topic, and endless random ones."""

import random

TOPICS = [
    "fox",
    "dog",
    "cat",
    "owl",
    "dragon",
    "robot",
    "princess",
    "sailor",
    "bear",
    "mouse",
    "rabbit",
    "knight",
    "frog",
    "tree",
    "star",
    "wizard",
    "horse",
    "cloud",
    "bird",
    "king",
]

_NAMES = [
    "Milo",
    "Luna",
    "Pip",
    "Nell",
    "Otto",
    "Wren",
    "Bram",
    "Tilly",
    "Juno",
    "Fern",
    "Hobb",
    "Daisy",
]
_TRAITS = ["little", "brave", "old", "kind", "shy", "clever", "tiny", "hungry", "sleepy", "curious"]
_PLACES = [
    "in a green forest",
    "near a quiet river",
    "on a high hill",
    "by the blue sea",
    "in a small village",
    "under an old bridge",
]
_PROBLEMS = [
    "lost a red ball",
    "could not find the way home",
    "heard a strange sound in the dark",
    "was afraid of the rain",
    "wanted to see the moon",
    "found a locked box",
]
_FRIENDS = ["a wise turtle", "a friendly crow", "a young girl", "a busy bee", "an old farmer"]
_HELP = [
    "walked along the path together",
    "shared some bread and made a plan",
    "looked behind every stone",
    "sang a song until the sun came up",
    "followed the light of the stars",
]
_ENDS = [
    "In the end all was well, and they became good friends.",
    "That night they laughed and slept in peace.",
    "From that day on, nobody was afraid again.",
    "At last they were home, and there was soup for everyone.",
]


def story(topic: str) -> str:
    """The story about `topic`, 45 to 60 words; every call returns the same one."""
    return _tell(topic, random.Random(f"story of a {topic}"))


def random_story(rng: random.Random) -> str:
    """A new story about a random topic."""
    return _tell(rng.choice(TOPICS), rng)


def _tell(topic: str, rng: random.Random) -> str:
    name, trait = rng.choice(_NAMES), rng.choice(_TRAITS)
    article = "an" if trait[0] in "aeiou" else "a"
    friend = rng.choice(_FRIENDS)
    return (
        f"Once upon a time there was {article} {trait} {topic} called {name}, who lived "
        f"{rng.choice(_PLACES)}. One day {name} {rng.choice(_PROBLEMS)}. Then {friend} came by "
        f"and wanted to help. They {rng.choice(_HELP)}. {rng.choice(_ENDS)}"
    )
