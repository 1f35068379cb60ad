"""Describe a loaded model to the engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.models.checkpoint import fingerprint
from engine.models.loader import num_parameters
from engine.models.spec import DecoderSpec
from engine.runner.device import dtype_name
from engine.runner.sleeping import source_name
from engine.types import EngineInfo, MemoryPlan

if TYPE_CHECKING:
    from engine.runner.load_plan import LoadPlan


def describe(plan: LoadPlan, memory: MemoryPlan, started_s: float) -> EngineInfo:
    """Describe a model that began loading at ``started_s``, in ``time.monotonic()`` seconds."""
    config, model, spec = plan.config, plan.model, plan.spec
    dtype, backend = dtype_name(plan.attention.dtype), plan.kernels.name
    source = source_name(config, plan.files.seed)
    rounding = config.quantization or "unquantised"
    kind = config.pooling_type or model.sentence.kind or "last"
    headers = plan.files.headers
    ranks = [] if plan.shard is None else [str(plan.shard)]
    return EngineInfo(
        model=config.model,
        architecture=spec.architecture,
        num_parameters=num_parameters(plan.full_spec),
        dtype=dtype,
        device=str(plan.attention.device),
        attention_backend=backend,
        vocab_size=spec.vocab_size,
        max_model_len=memory.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        memory=memory,
        fingerprint=fingerprint(
            model, headers, dtype, rounding, source, backend, kind, memory.cache_dtype, *ranks
        ),
        load_s=time.monotonic() - started_s,
        generation=config.generation,
        is_generative=spec.is_generative,
        window=_attention_window(config, plan.full_spec),
        is_recurrent=plan.full_spec.is_recurrent,
        pooling=model.pooling_info(kind),
        images=None if plan.images is None else plan.images.rules,
        audio=None if plan.audio is None else plan.audio.rules,
        video=None if plan.images is None else plan.images.video,
    )


def _attention_window(config: EngineConfig, spec: DecoderSpec) -> int | None:
    """Return how far back, in tokens, any token reads its sequence's blocks; None: no limit."""
    speculation = config.speculation
    if spec.chunk is not None or (speculation is not None and speculation.drafts_in_runner):
        return None  # a draft model shares the block ids
    return spec.max_window
