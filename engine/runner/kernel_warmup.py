"""Warm up kernels that only some requests need, after the first answers.

A GPU's kernels are compiled when they first run, and no request should wait for that. What every
step needs is compiled by the first steps or by graph capture (see ``graphs.py``). The rest is here:
kinds of sampling, draft verification, and a mixture of experts' products for growing batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from engine.models.decoder import Decoder
from engine.runner.rows import RowTable
from kernels.operations import Operations
from kernels.reference.drafts import DRAFT_STREAM
from kernels.sampling import LogitBias, TokenCounts

logger = logging.getLogger(__name__)


class KernelWarmup:
    """The warm-up runs that remain; none on a CPU, whose kernels are compiled ahead.

    Args:
        model: the decoder.
        operations: the kernels'.
        rows: the table, for its spare slot.
        max_tokens: the most tokens of a step.
        rejection_sampling: drafts of sampled texts are verified by rejection sampling.
    """

    def __init__(
        self,
        model: Decoder,
        operations: Operations,
        rows: RowTable,
        *,
        max_tokens: int,
        rejection_sampling: bool,
    ) -> None:
        self._model = model
        self._operations = operations
        self._rows = rows
        self._max_tokens = max_tokens
        self._rejection_sampling = rejection_sampling
        self._left = iter(()) if rows.tables.device.type == "cpu" else self._all()

    def run_next(self) -> bool:
        """Run one more; return whether there may be others."""
        run = next(self._left, None)
        if run is None:
            return False
        try:
            run()
        except Exception as error:  # the request that needs it will raise it
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("a kernel cannot be rehearsed: %s", reason)
        return True

    def _all(self) -> Iterator[Callable[[], object]]:
        yield from self._sampling_runs()
        yield from self._mixtures()

    def _sampling_runs(self) -> Iterator[Callable[[], object]]:
        """Yield the kinds of sampling, for the spare slot."""
        do, rows = self._operations, self._rows
        table, device, vocab_size = (
            rows.sampling.table,
            rows.newest.device,
            rows.sampling.vocab_size,
        )
        slots = torch.full((1,), rows.padding_slot, dtype=torch.int32, device=device)
        place = torch.zeros(1, dtype=torch.int64, device=device)
        seen, masks = slots.new_zeros((1, vocab_size)), slots.new_zeros((1, -(-vocab_size // 32)))
        bias = LogitBias(slots.new_zeros(1), torch.zeros(1, device=device), place)
        counts = TokenCounts(seen, seen.bool())

        def logits() -> torch.Tensor:
            return torch.zeros((1, vocab_size), device=device)

        ways = (None, bias, None), (counts, None, None), (None, None, masks), (counts, None, masks)
        for choose in (do.sample, do.distribution) if self._rejection_sampling else (do.sample,):
            for way in ways:
                yield lambda choose=choose, way=way: choose(logits(), slots, place, table, *way)
        yield lambda: do.feed_back(rows.newest, slots, place, table.count_line, counts)
        ones = torch.ones_like(slots)
        yield lambda: do.accept_drafts(rows.newest, slots, place, place.bool(), ones)
        if self._rejection_sampling:
            shares = logits().fill_(1.0 / vocab_size)
            yield lambda: do.distribution(logits(), slots, place, table)
            yield lambda: do.sample_from_probs(shares, place, place, DRAFT_STREAM)
            for proposed in (shares, None):
                yield lambda given=proposed: do.verify_drafts(shares, given, place, place, place)

    def _mixtures(self) -> Iterator[Callable[[], object]]:
        """Yield experts' products with as many tokens as each of their kernels takes."""
        dtype = self._model.dtype
        for mixture in self._model.moe_layers:
            for num_tokens in mixture.kernel_sizes:
                if num_tokens <= self._max_tokens:
                    yield lambda mixture=mixture, count=num_tokens: mixture.warm_up(count, dtype)
