"""Tokens on trial: fed to a recurrent model before it is known which of them are accepted.

    verify    state S, left as it is     t x y z  ─► what follows each of them
    settle    state S ◄─ t x             the accepted tokens, from what the layers had read of them

The keys and values of a rejected token are simply overwritten. A recurrent state has no slot per
token, so recurrent layers leave it unchanged while drafts are on trial, and hold their inputs to
it: some kilobytes a token, where a state has megabytes. After verification the accepted tokens are
fed to the state, in the same step and in device order. Between steps a state therefore always
reflects its sequence's own tokens, and nothing else needs to know of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.inputs import StepRows

# Feeds tokens to one layer's state: the tensors of ``Trial.record``, and their rows.
StateUpdate = Callable[..., object]


class Trial:
    """What the layers of one step have fed to their states.

    Args:
        tokens: [n] int64, the step's tokens on trial; None: all tokens are held, including those
            not on trial.
    """

    def __init__(self, tokens: torch.Tensor | None = None) -> None:
        self._tokens = tokens
        self._updates: list[Callable[[StepRows], object]] = []

    def record(self, feed: StateUpdate, *fed: torch.Tensor) -> None:
        """Hold these inputs [num_tokens, ...] of a layer's state; ``feed`` feeds them again."""
        if self._tokens is not None:
            fed = tuple(each.index_select(0, self._tokens) for each in fed)
        self._updates.append(partial(feed, *fed))

    def commit(self, rows: StepRows) -> None:
        """Feed the accepted tokens to the states: those of ``rows``, among the tokens held."""
        for feed in self._updates:
            feed(rows)
