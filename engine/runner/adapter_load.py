"""Where a loaded model, or one rank's share of it, keeps its adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.lora.store import AdapterStore
from engine.parallel.shard import cuts_of

if TYPE_CHECKING:
    from engine.runner.load_plan import LoadPlan


def make_adapters(plan: LoadPlan) -> AdapterStore:
    """A store that has read none yet."""
    config, attention = plan.config, plan.attention
    own = None
    if plan.shard is not None:
        from engine.parallel.adapters import own_delta

        own = own_delta(cuts_of(plan.whole, plan.shard))
    return AdapterStore(
        plan.whole,
        attention.dtype,
        attention.device,
        max_loaded=0 if config.batch_invariant else config.lora.max_loaded,
        max_on_host=config.lora.max_on_host,
        own=own,
    )
