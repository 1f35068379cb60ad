"""Create the LoRA adapter store of a loaded model, or of one rank's shard of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.lora.store import AdapterStore
from engine.parallel.shard import parameter_slices

if TYPE_CHECKING:
    from engine.runner.load_plan import LoadPlan

logger = logging.getLogger(__name__)


def make_adapters(plan: LoadPlan) -> AdapterStore:
    """Create an empty adapter store."""
    config, attention = plan.config, plan.attention
    reason = _refuse_invariant(plan) if config.batch_invariant else None
    if plan.full_spec.source is not None:
        reason = "encoder-decoder models take none here"
    if reason is not None:
        logger.info("adapters are off: %s", reason)
    own = None
    if plan.shard is not None:
        from engine.parallel.adapters import local_delta

        own = local_delta(parameter_slices(plan.full_spec, plan.shard))
    return AdapterStore(
        plan.full_spec,
        attention.dtype,
        attention.device,
        max_loaded=config.lora.max_loaded if reason is None else 0,
        max_on_host=config.lora.max_on_host,
        select_shard=own,
        checks_files=plan.shard is None or not plan.shard.number,
    )


def _refuse_invariant(plan: LoadPlan) -> str | None:
    """Return why LoRA results would depend on the batch, or None if they are batch-invariant."""
    if plan.spec.latent is not None:
        return "what they add to latent attention is not batch-invariant"
    if plan.kernels.name != "triton":
        return None
    from kernels.triton.check_products import check_experts  # same kernels

    return check_experts(plan.attention.dtype, plan.attention.device)
