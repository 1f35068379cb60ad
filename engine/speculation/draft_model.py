"""Drafting with a small model (Leviathan et al. 2023, Chen et al. 2023) or a head.

    plan ─► read new tokens ─► draft 1 ─► draft 2 ─► ... ─► rows with their drafts ─► the step

The draft model runs at the beginning of the step that verifies its drafts, on the same slots and
block tables. Its keys and values are in blocks with the same ids as the model's, in storage of its
own, so forks and copies apply to both. It reads a text only when it has to draft for it; the plan
then contains the whole text. Where drafts do not pay, it costs nothing. It records what its blocks
hold (``ReadBlocks``), and of a cached prefix it reads what is missing.

A head that is part of a checkpoint (``engine/models/draft_head``) is a draft model of one layer. It
reads each token together with the model's state of the token before (``Features``). So its text
begins with the second token, and its position t holds the token at t + 1:

    the model   t0  t1  t2  t3          a head   t1  t2  t3
    positions    0   1   2   3                    0   1   2

While drafting, a head reads its own drafts with states that it made itself. Accepted drafts are
read again with the model's states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.models.decoder import Decoder
from engine.models.draft_head.network import DraftHead
from engine.plan_rows import PlanRows
from engine.runner.drafts import DraftTokens
from engine.runner.graphs import DecodeGraphs
from engine.runner.inputs import HostBatch, send
from engine.runner.programs import DecodePrograms
from engine.runner.rows import RowTable
from engine.runner.step_builder import StepBuilder
from engine.runner.transfer import Downloads, Uploads
from engine.speculation.batches import decode_batch, unread_batch
from engine.speculation.chains import DraftChains
from engine.speculation.draft_passes import DraftPass, fill_rows
from engine.speculation.features import Features
from engine.speculation.head_graphs import HEAD_LEAD, HeadGraphs
from engine.speculation.read_blocks import ReadBlocks, ReadState
from engine.types import BlockCopy, StepPlan
from kernels.attention import AttentionSpec
from kernels.inputs import StepRows
from kernels.operations import Kernels
from kernels.reference.drafts import DRAFT_STREAM
from kernels.transfer import to_device

# Tokens read at once when much of a text is unread.
_MAX_CHUNK_TOKENS = 1024
# Mean number of tokens per row up to which a recorded single-token step is cheaper than a chunk,
# and a captured one of a head, which reads all of a row's last drafts again.
_MAX_SINGLE_TOKENS = 2
_MAX_SINGLE_TOKENS_OF_HEAD = 8
# Total number of tokens up to which recorded programs read them faster than a chunk would.
_MAX_RECORDED_TOKENS = 256


class DraftModel:
    """Reads what the model reads, and drafts for the rows that ask for it.

    Args:
        model: the decoder or head.
        cache: its KV cache, with as many blocks as the large model's.
        kernels: the kernels that the decoder was made with.
        attention_spec: what they were chosen for.
        rows: the runner's row table.
        vocab_size: of the large model; tokens that only one of the models has are never drafted.
        rejection_sampling: draw with noise of its own, and keep the distributions drawn from.
        programs: recorded or captured passes, which do not feed back; None: there are none.
        features: what a head reads; None: the model is not a head.
    """

    def __init__(
        self,
        model: Decoder | DraftHead,
        cache: KVCache,
        kernels: Kernels,
        attention_spec: AttentionSpec,
        rows: RowTable,
        *,
        vocab_size: int,
        rejection_sampling: bool,
        programs: DecodePrograms | DecodeGraphs | HeadGraphs | None = None,
        features: Features | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._spec = attention_spec
        self._builder = StepBuilder(model.rotations, kernels, attention_spec)
        self._rows = rows
        self._vocab_size = vocab_size
        self._rejection_sampling = rejection_sampling
        self._features = features
        self._lead = 0 if features is None else HEAD_LEAD  # leading tokens that are not read
        # Programs neither clamp token ids that the draft model lacks, nor mask out drafts that the
        # large model lacks. So they are used only where the vocabularies have the same size.
        self._programs = programs if model.spec.vocab_size == vocab_size else None
        self._max_single_tokens = _MAX_SINGLE_TOKENS
        self._head_states: torch.Tensor | None = None  # which captured passes leave
        if isinstance(self._programs, HeadGraphs):
            self._max_single_tokens = _MAX_SINGLE_TOKENS_OF_HEAD
            self._head_states = self._programs.states
            self._reading, self._following = self._programs.reading, self._programs.following
        else:
            self._reading = self._following = self._programs
        self._uploads = Uploads(attention_spec.device)
        self._downloads = Downloads(attention_spec.device)
        self._chains: DraftChains | None = None
        if (
            isinstance(self._programs, DecodePrograms)
            and features is None
            and not rejection_sampling
        ):
            self._chains = DraftChains(self._programs, self._uploads)
        self._read_states: dict[str, ReadState] = {}
        self._blocks = ReadBlocks(cache.num_blocks, attention_spec.block_size)

    def tensors(self) -> list[torch.Tensor]:
        """All its storage indexed by block, including the features that a head reads.

        The first dimension of each tensor is the block.
        """
        own = self._cache.tensors()
        return own if self._features is None else [*own, self._features.blocks()]

    def capture_next(self) -> bool:
        """Capture its steps for one more number of rows; true if more are left."""
        return self._programs is not None and self._programs.capture_next()

    def exchange(self, offloads: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Note that all of ``tensors`` have been copied for these offloads and loads."""
        self._blocks.exchange(offloads, loads)

    def forget(self, row_ids: Iterable[str]) -> None:
        """Forget rows that are being removed; unknown ids are ignored."""
        for row_id in row_ids:
            self._read_states.pop(row_id, None)

    def propose(self, plan: StepPlan) -> tuple[PlanRows, DraftTokens | None]:
        """Draft for the plan's rows that have ``DRAFT_TOKEN``.

        The rows' tables already contain the plan's blocks.

        Returns:
            The rows, in which drafts made on a CPU replace ``DRAFT_TOKEN``, and the drafts, or None
            if no row asks for any. Drafts made on a GPU are only in the latter, so that nothing
            has to wait for them.
        """
        self._record_blocks(plan)
        rows = plan.rows
        if not rows.num_drafts:
            return rows, None
        # Rows that want the most come first, so each pass runs on a prefix of the previous one's
        # rows.
        counts = rows.num_drafts
        wanting = sorted(counts, key=lambda place: -counts[place])
        row_ids = [rows.ids[place] for place in wanting]
        slots = np.array(self._rows.slots(row_ids), np.int32)
        reads = [
            self._read_state(row_id, slot, rows.known_token_ids[place])
            for row_id, slot, place in zip(row_ids, slots.tolist(), wanting, strict=True)
        ]
        for row_id, read in zip(row_ids, reads, strict=True):
            self._catch_up(row_id, read)
        wants = [counts[place] for place in wanting]
        passes = self._chained(slots, row_ids, reads, wants)
        if passes is None:
            passes = self._one_by_one(slots, row_ids, reads, wants)
        for slot, read in zip(slots.tolist(), reads, strict=True):
            self._mark_read(slot, read)
        # A head has read its drafts with states of its own, so accepted ones are read again.
        keeps = self._features is None
        return fill_rows(rows, reads, wanting, passes, self._downloads, keeps_read=keeps)

    def _chained(
        self, slots: np.ndarray, row_ids: list[str], reads: list[ReadState], wants: list[int]
    ) -> list[DraftPass] | None:
        """Read what is unread and draft, in one native call; None if unsupported.

        The rows that want the most drafts come first.
        """
        chains = self._chains
        if chains is None or not wants or not chains.is_possible:
            return None
        self._rows.changes()
        if self._rows.sampling.bias(slots) is not None:
            return None
        late = [read for read in reads if len(read.unread) > _MAX_SINGLE_TOKENS]
        if late:
            self._read_ahead(chains, slots, row_ids, reads)
        lengths = [len(read.unread) for read in reads]
        widths = [sum(want > depth for want in wants) for depth in range(wants[0])]
        last = np.cumsum(lengths[: len(wants)]) - 1
        passes = chains.propose(unread_batch(slots, reads, lengths), last, widths)
        return [DraftPass(token_ids, None) for token_ids in passes]

    def _read_ahead(
        self, chains: DraftChains, slots: np.ndarray, row_ids: list[str], reads: list[ReadState]
    ) -> None:
        """Read all but the last unread token of each row."""
        ahead = [ReadState(read.num_read, read.unread[:-1]) for read in reads]
        lengths = [len(read.unread) for read in ahead]
        if sum(lengths) <= _MAX_RECORDED_TOKENS:
            batch = unread_batch(slots, ahead, lengths)
            chains.read(batch.slots, batch.starts, batch.token_ids)
        else:
            longer = [at for at, length in enumerate(lengths) if length]
            self._read([row_ids[at] for at in longer], [ahead[at] for at in longer], 0)
        for read, length in zip(reads, lengths, strict=True):
            read.num_read += length
            del read.unread[:-1]

    def _one_by_one(
        self, slots: np.ndarray, row_ids: list[str], reads: list[ReadState], wants: list[int]
    ) -> list[DraftPass]:
        """As ``_chained``, with one pass from Python for each draft."""
        passes = self._read(row_ids, reads, len(wants))
        ends = np.array([read.end for read in reads], np.int32)
        batches: list[HostBatch] = []
        for depth in range(1, wants[0] if wants else 0):
            width = sum(want > depth for want in wants)
            # The tokens are on the device already.
            batches.append(decode_batch(slots[:width], ends[:width] + (depth - 1), np.zeros(width)))
        if batches:
            # One transfer for all passes; several would wait for each other's buffers.
            first = batches[0]
            starts = (batch.starts for batch in batches)
            of_slots, steps, *sent = self._uploads.send((first.slots, first.query_start, *starts))
            for batch, own in zip(batches, sent, strict=True):
                width = batch.slots.size
                places = (of_slots[:width], steps[: width + 1], own)
                passes.append(self._draft_next(batch, places, passes[-1]))
        return passes

    def _record_blocks(self, plan: StepPlan) -> None:
        """Record which blocks the plan allocates and copies."""
        blocks, rows, size = self._blocks, plan.rows, self._spec.block_size
        num_shared: dict[int, int] = {}  # tokens before an added row's first, by last block
        if rows.new_blocks:
            # An added row's cached blocks come first in its list.
            added = {new.request.id for new in plan.added}
            for place, new_blocks in rows.new_blocks.items():
                num_found = 0
                if rows.ids[place] in added and (start := rows.starts[place]):
                    num_found = -(-start // size)
                    num_shared[new_blocks[num_found - 1]] = start - (num_found - 1) * size
                blocks.reset(new_blocks[num_found:])
        if plan.copies:
            blocks.copy(plan.copies, num_shared)
            pairs = to_device(torch.tensor(plan.copies), self._spec.device).view(-1, 2)
            sources, targets = pairs.T.contiguous().unbind()
            for layer in self._cache.paged:
                self._kernels.operations.copy_blocks(layer, sources, targets)
            if self._features is not None:
                self._features.copy(plan.copies)

    def _read_state(self, row_id: str, slot: int, text: Sequence[int]) -> ReadState:
        """The position up to which a row's text has been read, with all its unread tokens."""
        read = self._read_states.get(row_id)
        if read is None:
            # A head's state of a block's last token depends on the next token, which sequences that
            # share the block need not have in common, so that token is read again.
            table = self._rows.host_tables[slot]
            num_read = max(0, self._blocks.num_read(table, len(text) - 1) - self._lead)
            read = self._read_states[row_id] = ReadState(num_read, num_recorded=num_read)
        read.update(text, self._lead)
        return read

    def _catch_up(self, row_id: str, read: ReadState) -> None:
        """Read the bulk of a text that has many unread tokens."""
        while len(read.unread) > _MAX_CHUNK_TOKENS:
            self._read([row_id], [ReadState(read.num_read, read.unread[:_MAX_CHUNK_TOKENS])], 0)
            read.num_read += _MAX_CHUNK_TOKENS
            del read.unread[:_MAX_CHUNK_TOKENS]

    def _mark_read(self, slot: int, read: ReadState) -> None:
        """Note that all unread tokens have been read."""
        end = read.end
        self._blocks.record(self._rows.host_tables[slot], read.num_recorded, end)
        read.num_read, read.unread, read.num_recorded = end, [], end

    def _read(
        self, row_ids: list[str], reads: list[ReadState], num_wanting: int
    ) -> list[DraftPass]:
        """Read everything unread of the given rows, and make the first draft of the first ones."""
        lengths = [len(read.unread) for read in reads]
        if sum(lengths) <= self._max_single_tokens * len(reads):
            passes = self._read_singly(row_ids, reads, lengths, num_wanting)
            if passes is not None:
                return passes
        query_start = np.zeros(len(reads) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        batch = HostBatch(
            slots=np.array(self._rows.slots(row_ids), np.int32),
            query_start=query_start,
            starts=np.array([read.num_read for read in reads], np.int32),
            token_ids=np.array([t for read in reads for t in read.unread], np.int32),
            sampling_rows=np.arange(max(1, num_wanting), dtype=np.int32),
        )
        sent = send(batch, (), self._rows, self._uploads)
        wanted = sent.rows.query_start[1:].index_select(0, sent.sampling_rows) - 1
        hidden, seq_lens = self._forward(batch, sent.rows, wanted)
        if not num_wanting:
            return []
        slots = sent.rows.slots.index_select(0, sent.sampling_rows)
        positions = seq_lens.index_select(0, sent.sampling_rows).long() + self._lead
        logits = self._model.logits(hidden)
        draft_pass = self._choose(logits, batch.slots[:num_wanting], slots, positions)
        return [draft_pass._replace(states=hidden)]

    def _read_singly(
        self, row_ids: list[str], reads: list[ReadState], lengths: list[int], num_wanting: int
    ) -> list[DraftPass] | None:
        """As ``_read``, as a recorded step with one token per row; None if there is none."""
        batch = unread_batch(np.array(self._rows.slots(row_ids), np.int32), reads, lengths)
        graph = self._reading.find(batch) if self._reading is not None else None
        if graph is None or self._reading is None:
            return None
        self._reading.load(graph, batch, self._uploads)
        graph.forward()
        if not num_wanting:
            return []
        last = np.cumsum(lengths)[:num_wanting] - 1
        at = to_device(torch.from_numpy(last), self._spec.device)
        slots, positions = graph.slots[at], graph.positions[at]
        drafted = self._choose(graph.logits[at].float(), batch.slots[last], slots, positions)
        if self._head_states is not None:
            drafted = drafted._replace(states=self._head_states[at])
        return [drafted]

    def _draft_next(
        self,
        batch: HostBatch,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        last: DraftPass,
    ) -> DraftPass:
        """Make one more draft: read the first of the last drafts, and choose their successors.

        Args:
            batch: the rows.
            places: their slots, query starts and starts, on the device.
            last: the previous drafts.
        """
        slots = batch.slots
        token_ids = last.token_ids[: slots.size]
        states = None if last.states is None else last.states[: slots.size]
        graph = self._following.find(batch) if self._following is not None else None
        if graph is not None and self._following is not None:
            self._following.load(graph, batch, self._uploads)
            count = slots.size  # without padding rows
            graph.token_ids[:count].copy_(token_ids)
            if self._head_states is not None and states is not None:
                states = self._head_states[:count].copy_(states)
            graph.forward()
            if self._rejection_sampling or self._rows.sampling.bias(slots) is not None:
                logits, positions = graph.logits[:count].float(), graph.positions[:count]
                drafted = self._choose(logits, slots, graph.slots[:count], positions)
            else:
                graph.sample()
                drafted = DraftPass(graph.sampled.token_ids[:count].clone(), None)
            return drafted._replace(states=states)
        rows = StepRows(*places, token_ids.to(torch.int32))
        hidden, seq_lens = self._forward(batch, rows, None, states)
        positions = seq_lens.long() + self._lead
        draft_pass = self._choose(self._model.logits(hidden), slots, rows.slots, positions)
        return draft_pass._replace(states=hidden)

    def _forward(
        self,
        batch: HostBatch,
        rows: StepRows,
        wanted: torch.Tensor | None,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of the wanted tokens, and the rows' lengths.

        A head reads ``states``, or the stored features of the tokens if None.
        """
        inputs, _, state = self._builder.build(batch, rows, self._rows)
        if self._features is not None:
            read = self._features.of(inputs.slot_mapping) if states is None else states
            state = replace(state, previous_hidden_states=read)
        token_ids = inputs.input_ids.clamp(max=self._model.spec.vocab_size - 1)
        return self._model.forward(token_ids, state, self._cache.layers, wanted), inputs.seq_lens

    def _choose(
        self,
        logits: torch.Tensor,
        host_slots: np.ndarray,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> DraftPass:
        """Choose as the request samples, but without penalties and masks. Overwrites the logits."""
        if logits.shape[1] != self._vocab_size:
            missing = self._vocab_size - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        state = self._rows.sampling
        table, bias = state.table, state.bias(host_slots)
        do = self._kernels.operations
        if not self._rejection_sampling:
            return DraftPass(do.sample(logits, slots, positions, table, None, bias).token_ids, None)
        proposed = do.distribution(logits, slots, positions, table, None, bias)
        seeds = table.seed[slots.long()]
        return DraftPass(do.sample_from_probs(proposed, seeds, positions, DRAFT_STREAM), proposed)
