"""Chooses the rows of a step: first running sequences, then newly admitted ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.kv_cache.pool import BlockTable, Prefix
from engine.plan_rows import PlanRows, ScheduledRow
from engine.scheduler import snapshots
from engine.scheduler.drafts import plan_drafts
from engine.scheduler.passes import plan_passes
from engine.scheduler.policy import Shortage, unfinished_prompts
from engine.scheduler.reuse import computed_prefix, should_wait_for_prefix, usable_leader
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import Fill, StepBuilder, added_row
from engine.scheduler.suspect_gate import SuspectGate
from engine.speculation.speculator import Speculator
from engine.types import PENDING_TOKEN, BlockCopy

_PENDING = (PENDING_TOKEN,)


class _Blocked(NamedTuple):
    """The sequence that last lacked blocks at the head of the queue."""

    seq: Sequence
    room: int  # blocks then, less those kept as spares
    missing: bytes | None  # digest of the block that its cached prefix lacked first, if any
    num_changes: int  # of the state then


class Planner:
    """Plans steps. From then on planned tokens count as computed."""

    def __init__(
        self, config: SchedulerConfig, state: SchedulerState, speculator: Speculator | None = None
    ) -> None:
        self._config = config
        self._state = state
        self._speculator = speculator
        self._blocked: _Blocked | None = None
        self._gate = SuspectGate()

    def plan(
        self, admit: bool, now_s: float, max_passes: int = 1, max_prompt_tokens: int | None = None
    ) -> StepBuilder:
        """Plan the next step; with ``admit`` false, admit nothing."""
        budget = self._config.step_budget(len(self._state.running))
        prompts = budget
        if max_prompt_tokens is not None and self._has_decoding():
            prompts = max_prompt_tokens
        step = StepBuilder(budget, self._max_decode_rows(budget), prompts)
        first, *behind = self._by_urgency()
        self._plan_running(step, first)
        for running in behind:
            if admit and not step.num_preempted:
                self._plan_waiting(step, now_s, before=running[0])
            # An admission may have preempted some of these.
            self._plan_running(step, [seq for seq in running if seq.status is Status.RUNNING])
        # Do not hand a preempted sequence's blocks to another, nor readmit it at once.
        if admit and not step.num_preempted:
            self._plan_waiting(step, now_s)
        self._state.policy.charge(step.seqs, step.rows)
        if self._speculator is not None:
            if not self._speculator.try_skip_step(len(step.seqs)):
                plan_drafts(step, self._state, self._speculator)
            max_passes = min(max_passes, 1 + self._speculator.num_idle)
        if max_passes > 1:
            num_passes = plan_passes(step, self._state, max_passes)
            if self._speculator is not None:
                self._speculator.skip(num_passes - 1)
        return step

    @property
    def has_room_for_suspect(self) -> bool:
        """Whether a suspect that is not queued yet need not wait for others."""
        return self._gate.has_room(self._state.sequences.values())

    def _max_decode_rows(self, budget: int) -> int:
        """How many running sequences may decode in one step.

        With several steps in flight, each of different sequences, every step gets an equal share,
        so that all pipeline stages have the same amount of work.
        """
        num_steps = self._config.num_micro_batches
        return budget if num_steps == 1 else -(-len(self._state.running) // num_steps)

    def _has_decoding(self) -> bool:
        """Whether any running sequence decodes, so that its client waits for the step to end.

        The longest-running sequences come first and most often decode, so this usually stops early.
        """
        return any(seq.num_tokens - seq.num_computed <= 1 for seq in self._state.running.values())

    def _by_urgency(self) -> list[list[Sequence]]:
        """The running sequences in groups; between two groups waiting sequences get a turn."""
        state = self._state
        first = list(state.running.values())
        background: list[Sequence] = []
        if state.num_background:
            background = [seq for seq in first if seq.request.background]
            first = [seq for seq in first if not seq.request.background]
        head = state.waiting.head()
        if head is not None and head.request.background:
            head = None
        late = state.policy.ranked_prompts(first, head)
        if late:
            ids = {seq.id for seq in late}
            first = [seq for seq in first if seq.id not in ids]
        return [first, *([seq] for seq in late), *([background] if background else [])]

    def _precedes(self, head: Sequence, seq: Sequence) -> bool:
        """Whether ``head``, which waits, is served before ``seq``, which runs."""
        if head.request.background or seq.request.background:
            return not head.request.background
        return self._state.policy.precedes(head, seq)

    # ------------------------------------------------------------ running sequences

    def _plan_running(self, step: StepBuilder, running: list[Sequence]) -> None:
        # This loop visits every running sequence in every step. Nearly all of them add one token,
        # so that case is inlined and kept minimal. With overlapped steps, the token is one that the
        # previous step has yet to sample.
        budget, places, num_decoded = step.budget, step.decode_slots, 0
        waits = self._config.num_micro_batches > 1
        block_size = self._state.pool.block_size
        rows, add_seq = step.rows, step.seqs.append
        add_id, add_start, add_tokens = rows.ids.append, rows.starts.append, rows.token_ids.append
        for seq in running:
            if not budget:
                break
            token_ids, pending, table = seq.token_ids, seq.num_pending, seq.table
            if pending and (
                waits or seq.depends_on_output or seq.draft_ids or seq.should_wait_for_token
            ):
                continue  # its token, mask, position or drafts depend on a step in flight
            start = seq.num_computed
            end = len(token_ids) + pending
            decodes = end - start == 1 and end < seq.max_num_tokens
            if decodes and num_decoded == places:
                continue  # it gets a place in the next step
            if decodes and (end <= table.capacity or self._grow(rows, table)):
                add_id(seq.id)
                add_start(start)
                add_tokens(_PENDING if pending else (token_ids[start],))
                add_seq(seq)
                seq.num_computed = end
                seq.num_pending = pending + 1
                if not end % block_size:  # drafts and passes may have left blocks behind this one
                    step.fills.append(Fill(seq, table, start, end))
                budget -= 1
                num_decoded += 1
            elif end > start and not (pending and end >= seq.max_num_tokens):  # last is pending
                step.budget = budget
                self._plan_chunk(step, seq, running)
                budget = step.budget
        step.budget = budget
        step.decode_slots -= num_decoded
        self._state.num_wasted -= num_decoded

    def _grow(self, rows: PlanRows, table: BlockTable) -> bool:
        """Allocate a block for the row that is about to be added; false if none is free."""
        pool = self._state.pool
        if not pool.num_free:
            return False
        rows.new_blocks[len(rows.ids)] = tuple(pool.extend(table, 1))
        self._state.num_wasted += pool.block_size
        return True

    def _plan_chunk(self, step: StepBuilder, seq: Sequence, running: list[Sequence]) -> None:
        """Plan a running sequence that needs blocks or has several tokens to compute.

        A prompt leaves a token to each sequence behind it in ``running`` that decodes.
        """
        pool = self._state.pool
        while seq.status is Status.RUNNING:  # it may be preempted below
            is_prompt = seq.num_tokens - seq.num_computed > 1
            yields = is_prompt and self._state.policy.should_throttle_prompt(seq)
            room = self._chunk_budget(step, throttled=yields) if is_prompt else step.budget
            if not room:
                return
            if is_prompt:
                behind = running[running.index(seq) + 1 :]
                num_prompts = len(unfinished_prompts(behind))
                room = min(room, max(1, step.budget - len(behind) + num_prompts))
            end = snapshots.chunk_end(pool, seq, min(seq.num_tokens, seq.num_computed + room))
            end = seq.adjust_chunk_end(end)
            if pool.blocks_for(end) - len(seq.table.block_ids) <= pool.num_free:
                self._plan_row(step, seq, self._allocate_blocks(seq, end), end, throttled=yields)
                return
            self._preempt_last(step)

    def _preempt_last(self, step: StepBuilder) -> None:
        """Preempt the running sequence that the policy ranks last."""
        if step.victims is None:
            step.victims = sorted(self._state.running.values(), key=self._state.policy.rank)
        self._preempt(step, step.victims.pop())

    def _preempt(self, step: StepBuilder, victim: Sequence) -> None:
        step.num_preempted += 1
        snapshots.cancel_copies(self._state.pool, step, victim)
        self._state.preempt(victim, step.remove_row(victim))

    # ------------------------------------------------------------ waiting sequences

    def _plan_waiting(
        self, step: StepBuilder, now_s: float, *, before: Sequence | None = None
    ) -> None:
        """Admit what fits; with ``before``, only sequences that precede that running one."""
        state, max_seqs = self._state, self._config.max_num_seqs
        while step.budget:
            seq = state.waiting.head()
            if seq is None or (before is not None and not self._precedes(seq, before)):
                return
            short: Shortage | None
            if len(state.running) < max_seqs:
                short = self._admit(step, seq, now_s)
            else:
                short = Shortage(max_seqs, 1, _one_place)
            if short is not None and (short is _NOT_YET or not self._preempt_for(step, seq, short)):
                return

    def _preempt_for(self, step: StepBuilder, seq: Sequence, short: Shortage) -> bool:
        """Preempt a running sequence to make room for ``seq``; false if there is no victim."""
        state = self._state
        # Sequences whose prompts are computed whole end with this step anyway.
        if seq.num_pending or seq.request.background or self._config.unchunked_prefill:
            return False
        kept = step.copy_source_ids.union(row.request.id for row in step.added)
        running = state.running.values()
        if state.num_background:
            background = (
                other for other in running if other.request.background and other.id not in kept
            )
            victim = max(background, key=state.policy.rank, default=None)
        else:
            victim = state.policy.victim(seq, running, kept, state.waiting, short)
        if victim is None or not self._chunk_budget(
            step, throttled=state.policy.should_throttle_prompt(seq)
        ):
            return False
        self._preempt(step, victim)
        return True

    def _admit(self, step: StepBuilder, seq: Sequence, now_s: float) -> Shortage | None:
        """Start ``seq`` if there are enough blocks for all its tokens, and some to spare.

        Otherwise what it lacks, for which others may be preempted, or ``_NOT_YET``.
        """
        state, pool = self._state, self._state.pool
        if not self._gate.admits(seq):
            return _NOT_YET
        short = Shortage(pool.num_blocks, pool.blocks_for(len(seq.token_ids)), _num_blocks)
        # Either it was preempted while a step was sampling its next token, which is still to come,
        # or its prompt must not be split and exceeds what is left of the step.
        if seq.num_pending or (self._config.unchunked_prefill and len(seq.token_ids) > step.budget):
            return short
        if state.running and self._is_still_blocked(seq):
            return short
        if not self._chunk_budget(step, throttled=state.policy.should_throttle_prompt(seq)):
            return short  # and sequences behind it have received at least as much
        leader = usable_leader(state, seq)
        looks_up = leader is None and not seq.must_compute_prompt
        prefix = computed_prefix(state, seq, leader)
        free = pool.num_free - len(state.running)
        if self._num_blocks_needed(seq, prefix) > free:
            missing: bytes | None = None
            if looks_up and pool.snapshots is None:  # else a prefix ends at a snapshot
                missing = pool.next_digest(seq.chain, seq.token_ids, prefix)
            self._blocked = _Blocked(seq, free, missing, state.num_changes)
            return short
        if looks_up and should_wait_for_prefix(state, seq, prefix):
            return _NOT_YET
        self._start(step, seq, leader, prefix, now_s, looked_up=looks_up)
        return None

    def _num_blocks_needed(self, seq: Sequence, prefix: Prefix) -> int:
        """How many free blocks admit ``seq`` with that prefix, besides the spare ones.

        One spare block is kept per running sequence. Otherwise the newcomer, which ranks last,
        would be preempted as soon as one of them needs a block, and its computation wasted.
        """
        pool = self._state.pool
        needed = pool.blocks_for(len(seq.token_ids)) - prefix.num_skipped
        needed += pool.num_free_blocks_needed(prefix.block_ids) - len(prefix.block_ids)
        # One that was preempted would be so again, and its tokens computed in vain once more, if it
        # took what prompts need that are still being computed. It may have been preempted for them.
        return needed + self._num_owed_blocks() if seq.num_preemptions else needed

    def _start(
        self,
        step: StepBuilder,
        seq: Sequence,
        leader: Sequence | None,
        prefix: Prefix,
        now_s: float,
        *,
        looked_up: bool,
    ) -> None:
        """Admit ``seq``, which shares its leader's prompt or has a cached prefix, with a row."""
        state, pool = self._state, self._state.pool
        yields = state.policy.should_throttle_prompt(seq)
        room = self._chunk_budget(step, throttled=yields)
        if leader is None:
            self._plan_loads(step, pool.adopt(seq.table, prefix))
            seq.num_computed = seq.num_confirmed = seq.table.capacity
            snapshots.plan_restore(pool, step, seq)
        else:
            self._fork(step, seq, leader)
        state.start(seq)
        self._gate.note_admission(seq)
        if seq.num_cached is None:  # first admission: later, it would find its own blocks
            seq.scheduled_s = now_s
            seq.num_cached = min(seq.num_computed, seq.num_prompt)
            if looked_up:
                state.count_lookup(seq, prefix)
        step.added.append(added_row(seq))
        end = snapshots.chunk_end(pool, seq, min(len(seq.token_ids), seq.num_computed + room))
        end = seq.adjust_chunk_end(end)
        self._allocate_blocks(seq, end)
        self._plan_row(step, seq, seq.table.block_ids, end, throttled=yields)

    def _fork(self, step: StepBuilder, seq: Sequence, leader: Sequence) -> None:
        """Let ``seq`` share its leader's prompt. The copy of its last, partly filled block has not
        been made yet, so nothing of it has landed."""
        seq.num_computed = seq.num_prompt - 1
        seq.table, copy = self._state.pool.fork(leader.table, seq.num_computed)
        self._state.num_wasted += seq.table.capacity - seq.num_computed
        if copy is not None:
            step.copies.append(copy)
            step.copy_source_ids.add(leader.id)

    def _is_still_blocked(self, seq: Sequence) -> bool:
        """Whether the head of the queue lacks as many blocks as before, without another lookup.

        It does not if blocks were freed, if fewer sequences keep a spare one, or if more of its
        prefix was computed for a sequence with which it can share that.
        """
        pool, blocked = self._state.pool, self._blocked
        room = pool.num_free - len(self._state.running)
        if blocked is None or seq is not blocked.seq or room > blocked.room:
            return False
        if seq.num_preemptions and self._state.num_changes != blocked.num_changes:
            return False  # running prompts may need fewer blocks
        return blocked.missing is None or not pool.is_cached(blocked.missing)

    def _num_owed_blocks(self) -> int:
        """The blocks that the prompts of running sequences lack."""
        blocks_for = self._state.pool.blocks_for
        return sum(
            blocks_for(len(seq.token_ids)) - len(seq.table.block_ids)
            for seq in self._state.running.values()
            if len(seq.token_ids) - seq.num_computed > 1
        )

    # ------------------------------------------------------------ helpers

    def _chunk_budget(self, step: StepBuilder, *, throttled: bool) -> int:
        """How many tokens of a prompt still fit into the step."""
        # Prompts that must be computed whole are not limited further: a part would be of no use.
        if self._config.unchunked_prefill:
            return step.budget
        room = min(step.budget, step.prompt_budget)
        return min(room, step.throttled_budget) if throttled else room

    def _plan_loads(self, step: StepBuilder, loads: Iterable[BlockCopy]) -> None:
        """Plan loads from the host.

        A target block may already have a planned load, for a sequence that was preempted since; the
        newer load replaces it.
        """
        for slot, block in loads:
            former = step.loads.pop(block, None)
            if former is not None and self._state.pool.tier is not None:
                self._state.pool.tier.release([former], loaded=False)
            step.loads[block] = slot

    def _allocate_blocks(self, seq: Sequence, end: int) -> list[int]:
        """Allocate the blocks that ``seq`` lacks for its first ``end`` tokens; returns them."""
        pool = self._state.pool
        missing = pool.blocks_for(end) - len(seq.table.block_ids)
        self._state.num_wasted += missing * pool.block_size
        return pool.extend(seq.table, missing)

    def _plan_row(
        self,
        step: StepBuilder,
        seq: Sequence,
        new_blocks: Iterable[int],
        end: int,
        *,
        throttled: bool,
    ) -> None:
        """Add a row for the tokens of ``seq`` up to ``end``, for which it has blocks."""
        start, num_tokens = seq.num_computed, seq.num_tokens
        samples = end == num_tokens and num_tokens < seq.max_num_tokens
        tokens = tuple(seq.token_ids[start:end])
        tokens += _PENDING * (end - start - len(tokens))
        step.rows.append(ScheduledRow(seq.id, start, tokens, tuple(new_blocks), samples))
        step.seqs.append(seq)
        step.fills.append(Fill(seq, seq.table, start, end))
        step.budget = max(0, step.budget - (end - start))  # an unsplit span may exceed it
        if end - start > 1:
            step.prompt_budget = max(0, step.prompt_budget - (end - start))
            # A prompt that does not yield leaves nothing to those that do.
            step.throttled_budget = (
                max(0, step.throttled_budget - (end - start)) if throttled else 0
            )
        if self._state.pool.snapshots is not None:
            snapshots.plan_save(self._state.pool, step, seq, end)
        seq.num_computed = end
        seq.num_pending += samples
        self._state.num_wasted -= end - start


def _one_place(seq: Sequence) -> int:
    return 1


def _num_blocks(seq: Sequence) -> int:
    return seq.table.num_held


_NOT_YET = Shortage(0, 0, _num_blocks)  # there is room, but the head has to wait
