"""The layers of a sharded model that communicate, besides the sums after attention and MLP
(``engine/models/block.py``): the embeddings and the head.

Both are cut by tokens. Each token's embedding is on one rank, and the others add zeros; each rank
computes the logits of its own tokens, and rank 0 concatenates them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.nn import functional

from engine.models.linear import Head
from engine.models.modules import Modules
from engine.models.spec import DecoderSpec
from engine.parallel.group import Group
from engine.parallel.shard import Shard

# Has the other ranks compute logits of so many rows, while rank 0 does.
Announce = Callable[[int], AbstractContextManager[None]]


class VocabParallelEmbedding:
    """Looks up embeddings from a table that is sharded by tokens.

    Args:
        rows: of this rank's table: ids [n] -> [n, hidden_size].
        bounds: this rank's tokens.
        group: the ranks.
    """

    def __init__(
        self, rows: Callable[[torch.Tensor], torch.Tensor], bounds: tuple[int, int], group: Group
    ) -> None:
        self._rows = rows
        self._begin, self._end = bounds
        self._group = group

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Rank 0's ids [n] int64 -> [n, hidden_size]; the ids of other ranks are overwritten
        with them."""
        own = self._group.broadcast(ids) - self._begin
        outside = (own < 0) | (own >= self._end - self._begin)
        x = self._rows(own.masked_fill_(outside, 0))
        return self._group.all_reduce(x.masked_fill_(outside.unsqueeze(1), 0))


class ParallelLMHead:
    """A head that is sharded by tokens.

    Args:
        head: of this rank.
        vocab_size: of the model.
        shard: this rank's.
        group: the ranks.
        announce: on rank 0; the other ranks are called after its announcement.
    """

    def __init__(
        self, head: Head, vocab_size: int, shard: Shard, group: Group, announce: Announce | None
    ) -> None:
        self._head = head
        self._sizes = [
            end - begin
            for begin, end in (
                replace(shard, rank=rank).bounds(vocab_size) for rank in range(shard.size)
            )
        ]
        self._group = group
        self._announce = announce

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self._head.num_bytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of this rank's table; see ``Head``."""
        return self._head.rows(ids)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self.logits(x).to(x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of rank 0's rows [n, hidden_size].

        Returns [n, vocab_size] float32 on rank 0, and only this rank's part on the others.
        """
        with nullcontext() if self._announce is None else self._announce(x.shape[0]):
            return self._gathered(x)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        own = self._head.logits(self._group.broadcast(x)).float()
        widest = max(self._sizes)
        parts = self._group.gather(functional.pad(own, (0, widest - own.shape[1])))
        if not parts:
            return own
        pairs = zip(parts, self._sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in pairs], dim=1)


def parallelize_modules(
    modules: Modules,
    spec: DecoderSpec,
    shard: Shard,
    group: Group,
    announce: Announce | None = None,
) -> Modules:
    """Connect the embeddings and the head, if they are here, with those of the other ranks."""
    if modules.embed is None:
        return modules
    embed = VocabParallelEmbedding(modules.embed, shard.bounds(spec.vocab_size), group)
    head = modules.head
    if head is not None and spec.is_generative:
        head = ParallelLMHead(head, spec.vocab_size, shard, group, announce)
    per_layer = modules.per_layer
    if per_layer is not None:
        bounds = shard.bounds(spec.per_layer_vocab_size)
        per_layer = per_layer._replace(embed=VocabParallelEmbedding(per_layer.embed, bounds, group))
    return replace(modules, embed=embed, head=head, per_layer=per_layer)
