"""What an engine counts, as reported after each step."""

from __future__ import annotations

import msgspec


class DraftStats(msgspec.Struct, frozen=True):
    """Speculation statistics. Counters never decrease."""

    num_drafts: int = 0  # rows that verified at least one draft
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # first draft of a row, second, ...

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted, over all positions."""
        return sum(self.accepted_per_position)


class BlockStats(msgspec.Struct, frozen=True):
    """Usage of the KV blocks. ``total == held + free``; cached blocks may be either."""

    total: int = 0
    held: int = 0  # referenced by at least one sequence
    shared: int = 0  # referenced by more than one
    cached: int = 0  # holding a reusable prefix (held or free)
    free: int = 0  # allocatable, cached ones included
    wasted_slots: int = 0  # token slots in held blocks that hold no token
    block_size: int = 0  # tokens per block
    snapshots: int = 0  # saved recurrent states, from which later prompts can start

    @property
    def utilisation(self) -> float:
        """Share of blocks held, 0 to 1."""
        return self.held / self.total if self.total else 0.0

    @property
    def waste(self) -> float:
        """Share of the slots in held blocks that hold no token, 0 to 1."""
        slots = self.held * self.block_size
        return self.wasted_slots / slots if slots else 0.0


class TierStats(msgspec.Struct, frozen=True):
    """Blocks in host memory. Counters never decrease while the engine lives."""

    total: int = 0  # capacity; 0: there is no host tier
    used: int = 0
    num_offloaded: int = 0  # blocks copied from the device
    num_loaded: int = 0  # blocks copied back
    num_queries: int = 0  # prompt tokens looked up here because the device did not have them
    num_hits: int = 0  # of these, found; also counted in prefix_cache_hits


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot taken after a step. Counters never decrease while the engine lives."""

    num_running: int = 0
    num_waiting: int = 0  # including requests that are not queued yet
    blocks: BlockStats = BlockStats()
    tier: TierStats = TierStats()
    num_preemptions: int = 0
    num_recomputed: int = 0  # tokens computed again after preemption
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_steps: int = 0
    step_tokens: int = 0  # tokens of the step that preceded this snapshot
    # Summed over steps, to compute means over a run: slots held, and slots wasted, per step.
    slots_held_sum: int = 0
    slots_wasted_sum: int = 0
    drafts: DraftStats = DraftStats()
    running_adapters: tuple[str, ...] = ()  # names of the adapters of running sequences
    waiting_adapters: tuple[str, ...] = ()
