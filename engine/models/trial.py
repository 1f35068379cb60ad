"""Tokens on trial: fed to a model before it is known which of them stay.

    verify    state S, left as it is     t x y z  ─► what follows each of them
    settle    state S ◄─ t x             what was kept, from what the layers had read of it

Keys and values of a token that does not stay are overwritten. A state has no place for each token,
so the layers that keep one leave it alone while drafts are on trial, and hold on to what they fed
to it: some kilobytes a token, where a state has megabytes. Once the drafts are judged, what stays
is fed to the state in earnest, in the same step and in the order of the device's work. So between
steps a state is always that of its sequence's own tokens, and nobody else needs to know of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.inputs import StepRows

# Feeds tokens to the state of one layer, the tensors of ``Trial.hold`` and the rows they are of.
Feed = Callable[..., object]


class Trial:
    """What the layers of one step have fed to their states.

    Args:
        tokens: [n] int64, those of the step that are on trial; None: what is held is that of all,
            those that are not on trial among them.
    """

    def __init__(self, tokens: torch.Tensor | None = None) -> None:
        self._tokens = tokens
        self._feeds: list[Callable[[StepRows], object]] = []

    def hold(self, feed: Feed, *fed: torch.Tensor) -> None:
        """A layer has fed these [num_tokens, ...] to its state; ``feed`` does it again."""
        if self._tokens is not None:
            fed = tuple(each.index_select(0, self._tokens) for each in fed)
        self._feeds.append(partial(feed, *fed))

    def settle(self, rows: StepRows) -> None:
        """Feed what stays to the states: the tokens of these rows of what is held."""
        for feed in self._feeds:
            feed(rows)
