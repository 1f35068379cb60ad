"""Runs all passes of a draft model over some rows as one native call, without Python in between.

    unread tokens ─► [ pass ─ choose ─ pass on ─ pass ─ choose ─ pass on ─ ... ] ─► drafts

The passes are recorded steps (``engine/runner/programs.py``) on ever fewer rows, as those that want
the most drafts come first. The tokens chosen by one pass are written to the next one's inputs. A
chain is joined from existing programs, and cached for each combination of widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.runner.graphs import DecodeGraph
from engine.runner.inputs import HostBatch
from engine.runner.programs import DecodePrograms
from engine.runner.transfer import Uploads
from kernels.cpu.drafts import advance_draft_pass
from kernels.cpu.program import NotRecordableError, Program, Recorder, Workspace

_MAX_CHAINS = 512  # chains kept; each takes some kilobytes
_MAX_READ_TOKENS = 128  # tokens of one program that only reads


@dataclass(frozen=True, slots=True)
class _Chain:
    first: DecodeGraph
    last_tokens: np.ndarray  # [rows that want drafts] int32, rewritten for each call
    draft_ids: torch.Tensor  # [all drafts] int64, pass by pass
    in_order: torch.Tensor  # [rows that want drafts] int32, read by the links
    run: Program


class DraftChains:
    """The chains of one draft model.

    Args:
        programs: of its steps, which do not feed back.
        uploads: of the device.
    """

    def __init__(self, programs: DecodePrograms, uploads: Uploads) -> None:
        self._programs = programs
        self._uploads = uploads
        self._chains: dict[tuple[int, ...], _Chain] = {}

    @property
    def is_possible(self) -> bool:
        """Whether the model's steps can be recorded."""
        return self._programs.of_size(1) is not None

    def read(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Store the keys and values of these tokens, in order within each text. All [n] int32."""
        begin = 0
        while begin < slots.size:
            left = slots.size - begin
            size = min(_MAX_READ_TOKENS, 1 << (left.bit_length() - 1))
            piece = slice(begin, begin + size)
            reader = self._programs.prefill_program(size)
            parts = (slots[piece], positions[piece], token_ids[piece])
            np.concatenate(parts, out=reader.packed.numpy())
            reader.forward()
            begin += size

    def propose(
        self, batch: HostBatch, last_tokens: np.ndarray, widths: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """Read a batch of single tokens, and draft after them.

        Args:
            batch: some tokens of each text in order, each as a row.
            last_tokens: [widths[0]] int32, the indices in the batch of the last tokens of texts
                that want drafts, those that want the most first.
            widths: how many texts want at least one draft, at least two, and so on: at least one
                entry, not increasing, none of them 0.

        Returns:
            The drafts of each pass, [width] int64; the next call overwrites them.

        Raises:
            NotRecordableError: there is no memory for a program.
        """
        key = (batch.slots.size, *widths)
        chain = self._chains.get(key)
        if chain is None:
            if len(self._chains) == _MAX_CHAINS:
                self._chains.clear()
            chain = self._chains[key] = self._make(*key)
        self._programs.load(chain.first, batch, self._uploads)
        chain.last_tokens[:] = last_tokens
        chain.run()
        return chain.draft_ids.split(tuple(widths))

    def _make(self, size: int, *widths: int) -> _Chain:
        graphs = [self._graph(size), *(self._graph(width) for width in widths[1:])]
        guesses = torch.empty(sum(widths), dtype=torch.int64)
        last_tokens = np.empty(widths[0], np.int32)
        record = Recorder(Workspace())
        parts: list[Program] = []
        rows, in_order = torch.from_numpy(last_tokens), torch.arange(widths[0], dtype=torch.int32)
        for graph, after, chosen in zip(
            graphs, [*graphs[1:], None], guesses.split(widths), strict=True
        ):
            if not isinstance(graph.forward, Program) or not isinstance(graph.sample, Program):
                raise TypeError("only recorded steps make a chain")
            target = () if after is None else (after.packed, after.positions)
            arguments = (graph.packed, graph.sampled.token_ids, rows[: chosen.numel()], chosen)
            link, _ = record(lambda arguments=(*arguments, *target): advance_draft_pass(*arguments))
            parts += [graph.forward, graph.sample, link]
            rows = in_order
        return _Chain(graphs[0], last_tokens, guesses, in_order, Program.joined(parts))

    def _graph(self, size: int) -> DecodeGraph:
        graph = self._programs.of_size(size)
        if graph is None:
            raise NotRecordableError(f"a step of {size} rows")
        return graph
