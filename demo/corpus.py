"""The training text: an endless seeded stream of conversations, divided into shards.

Shard `i` of seed `s` is the same on every machine, so (seed, shards) identifies the corpus and no
text file is stored.
"""

import random
from collections.abc import Callable

from demo import conversations as talk
from demo import toolchats
from demo.staged_random import StagedRandom
from demo.template import render

SEED = 20261120
SHARD_SIZE = 4000

# generator -> its relative share in each of five periods. Chats with tools are long and teach
# copying: they come early, then the many facts need the tokens, then copying again.
MIXTURE: dict[Callable[[random.Random], dict], tuple[float, ...]] = {
    talk.single_turn: (44, 50, 50, 46, 52),
    talk.multi_turn: (17, 20, 18, 12, 14),
    talk.styled: (11, 11, 13, 20, 14),
    talk.memory: (5, 3, 3, 7, 5),
    talk.long_conversation: (0.8, 0.4, 0.4, 0.3, 0.3),
    talk.open_story: (1.5, 1, 1, 0.7, 0.7),
    talk.plain_text: (3, 2, 2, 1.5, 1.5),
    toolchats.tool_conversation: (13, 5.5, 9, 14, 13),
    toolchats.parallel_tool_conversation: (2, 1, 1.5, 2, 1.5),
    toolchats.no_tool_conversation: (4, 2.5, 3, 2.5, 2.5),
}
MIXTURE_STARTS = (8, 17, 22, 32)
# The first shards of stages 1 to 4; see `StagedRandom`.
STAGE_STARTS = (10, 17, 22, 32)


def shard(index: int, seed: int = SEED, size: int = SHARD_SIZE) -> list[dict]:
    """The conversations of one shard, in training order."""
    stage = sum(index >= first for first in STAGE_STARTS)
    rng = StagedRandom.seeded(f"quire demo corpus {seed} {index}", stage)
    column = sum(index >= first for first in MIXTURE_STARTS)
    shares = [share[column] for share in MIXTURE.values()]
    return [maker(rng) for maker in rng.choices(list(MIXTURE), shares, k=size)]


def as_text(conversation: dict) -> str:
    """The text that the model reads: the rendered chat, or plain text with its end token."""
    if "text" in conversation:
        return conversation["text"] + "<|endoftext|>"
    return render(conversation["messages"], conversation.get("tools"))
