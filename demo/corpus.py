"""The training text: an endless seeded stream of conversations, cut into shards.

Shard `i` of seed `s` is the same on every machine, so the corpus is named by (seed, shards)
alone and no text file is stored.
"""

import random
from collections.abc import Callable, Iterator

from demo import conversations as talk
from demo import toolchats
from demo.template import render

SEED = 20261120
SHARD_SIZE = 4000

# (share, generator): shares are relative
MIXTURE: list[tuple[float, Callable[[random.Random], dict]]] = [
    (46, talk.single),
    (17, talk.several),
    (11, talk.styled),
    (3, talk.memory),
    (0.8, talk.long_talk),
    (1.5, talk.open_story),
    (3, talk.plain_text),
    (13, toolchats.tool_talk),
    (2, toolchats.parallel_talk),
    (4, toolchats.unneeded_talk),
]


def shard(index: int, seed: int = SEED, size: int = SHARD_SIZE) -> list[dict]:
    """The conversations of one shard, in training order."""
    rng = random.Random(f"quire demo corpus {seed} {index}")
    shares = [share for share, _ in MIXTURE]
    makers = [maker for _, maker in MIXTURE]
    return [maker(rng) for maker in rng.choices(makers, shares, k=size)]


def as_text(conversation: dict) -> str:
    """What the model reads: the rendered chat, or running text with its end mark."""
    if "text" in conversation:
        return conversation["text"] + "<|endoftext|>"
    return render(conversation["messages"], conversation.get("tools"))


def user_texts(conversation: dict) -> Iterator[str]:
    """The user's messages of a conversation."""
    for message in conversation.get("messages", ()):
        if message["role"] == "user":
            yield message["content"]
