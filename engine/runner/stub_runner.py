"""A runner without a model: it emits pseudo-random tokens at no cost (``--load-format stub``).

A server on it measures everything around the model: HTTP, tokenizer, process boundary, scheduler,
detokeniser, SSE. A step may be configured to sleep, so that tokens arrive as those of a real model
do and are not merged on the way. Of the model's directory only the config is read, and the
tokenizer by the API. The token at a position is a function of (seed, position), as with a real
model, so streams resume and repeat as usual. End-of-text tokens never occur, and there are no
log-probabilities. Embeddings cost as little.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.errors import InvalidParameter, ModelLoadError
from engine.limits import check_max_model_len
from engine.models.checkpoint import fingerprint, read_config
from engine.models.encoder.spec import EncoderSpec
from engine.models.spec import DecoderSpec
from engine.plan_rows import ScheduledRow
from engine.profiler import Spans
from engine.runner.protocol import CompletedStep, LaunchedStep, SleepingRunner
from engine.types import (
    Adapter,
    EngineInfo,
    MemoryPlan,
    Request,
    StepPlan,
    StepResult,
)

_MAX_BLOCKS = 2**16  # the block pool's bookkeeping takes memory
_BLOCK_SIZE = 16
_STRIDE = 7919  # a prime, so that consecutive positions get unrelated words


class StubRunner:
    """Obeys plans at the cost of one dictionary look-up a row.

    Args:
        info: what it pretends to have loaded.
        step_s: seconds that each step sleeps.
    """

    def __init__(self, info: EngineInfo, step_s: float = 0.0) -> None:
        self._info = info
        self._step_s = step_s
        never = set(info.eos_token_ids)
        self._vocabulary = [id_ for id_ in range(info.vocab_size) if id_ not in never]
        self._seeds: dict[str, int] = {}
        self._vectors = _Vectors(info)

    @property
    def info(self) -> EngineInfo:
        """The sizes of the model; no weights are loaded."""
        return self._info

    def set_spans(self, spans: Spans) -> None:
        """Do nothing: there are no parts to mark."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Raise InvalidParameter: there is no model to adapt."""
        raise InvalidParameter("a stub takes no adapters", param="model")

    def prepare(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def sleep(self, level: int) -> SleepingRunner:
        """See ``Runner.sleep``: there is nothing to free."""
        return _SleepingStub(self)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Execute one step. Never raises."""
        for row_id in plan.removed:
            self._seeds.pop(row_id, None)
            self._vectors.forget(row_id)
        for added in plan.added:
            self._seeds[added.request.id] = added.request.sampling.seed or 0
            self._vectors.expect(added.request)
        if self._step_s:
            time.sleep(self._step_s * plan.num_passes)
        seeds, vocabulary = self._seeds, self._vocabulary
        size = len(vocabulary)
        ids: list[str] = []
        tokens: list[tuple[int, ...]] = []
        for row in plan.rows:
            if row.is_sampled:
                end = row.start + len(row.token_ids)
                seed, chosen = seeds[row.id], ()
                for position in range(end - row.num_drafts, end + 1):
                    chosen += (vocabulary[(seed + position * _STRIDE) % size],)
                    if position < end and row.token_ids[position - row.start] != chosen[-1]:
                        break
                for position in range(end + 1, end + row.num_passes):
                    chosen += (vocabulary[(seed + position * _STRIDE) % size],)
                ids.append(row.id)
                tokens.append(chosen)
        pooled = self._vectors.of(plan.rows)
        return CompletedStep(
            StepResult(tuple(ids), tuple(tokens), (None,) * len(ids), pooled=pooled)
        )


class _SleepingStub:
    """A sleeping stub, which wakes as the same stub."""

    def __init__(self, runner: StubRunner) -> None:
        self._runner = runner

    def release(self) -> None:
        """See ``SleepingRunner``."""

    def wake(self) -> StubRunner:
        """See ``SleepingRunner``."""
        return self._runner

    def with_weights(self, model: str) -> SleepingRunner:
        """Raise ModelLoadError: a stub has no weights."""
        raise ModelLoadError("a stub has no weights to be exchanged")


class _Vectors:
    """Makes one-hot vectors whose index depends on the prompt's last token."""

    def __init__(self, info: EngineInfo) -> None:
        self._size = 0 if info.pooling is None else info.pooling.size
        self._lengths: dict[str, int] = {}  # of the prompts to embed

    def expect(self, request: Request) -> None:
        """Record a request if it asks for a vector."""
        if request.pooling is not None:
            self._lengths[request.id] = len(request.prompt_token_ids)

    def forget(self, request_id: str) -> None:
        """Delete a request."""
        self._lengths.pop(request_id, None)

    def of(self, rows: Iterable[ScheduledRow]) -> dict[str, bytes]:
        """Return the vectors of prompts that end in these rows, as little-endian float32."""
        lengths = self._lengths
        if not lengths:
            return {}
        return {
            row.id: self._one(row.token_ids[-1])
            for row in rows
            if row.start + len(row.token_ids) == lengths.get(row.id)
        }

    def _one(self, token: int) -> bytes:
        place = token % self._size
        return bytes(4 * place) + struct.pack("<f", 1.0) + bytes(4 * (self._size - 1 - place))


def load_stub_runner(config: EngineConfig, on_progress: LoadProgress | None = None) -> StubRunner:
    """Make a runner with the vocabulary and the context length of the model that ``config`` names.

    Raises:
        ModelLoadError: the directory or its config.json is missing, damaged or not supported, or
            the config asks to keep blocks that do not exist.
    """
    started_s = time.monotonic()
    model = read_config(config.model)
    if config.cache.offload_bytes:
        raise ModelLoadError("kv_offload_bytes: a stub has no KV cache")
    memory = _plan(model.spec, config)
    info = EngineInfo(
        model=config.model,
        architecture=model.spec.architecture,
        num_parameters=0,
        dtype="none",
        device="none",
        attention_backend="none",
        vocab_size=model.spec.vocab_size,
        max_model_len=memory.max_model_len,
        eos_token_ids=model.spec.eos_token_ids,
        memory=memory,
        fingerprint=fingerprint(model, [], "stub"),
        load_s=time.monotonic() - started_s,
        pooling=model.pooling_info("last"),
    )
    if on_progress is not None:
        on_progress(1.0, "no weights")
    return StubRunner(info, config.stub_step_ms / 1e3)


def _plan(spec: DecoderSpec | EncoderSpec, config: EngineConfig) -> MemoryPlan:
    """Plan blocks for every sequence at full length, within reason; they take no memory."""
    check_max_model_len(config.max_model_len, spec.max_context_len)
    longest = config.max_model_len or spec.default_context_len
    block_size = config.cache.block_size or _BLOCK_SIZE
    num_blocks = config.cache.num_blocks or min(
        -(-longest // block_size) * config.scheduler.max_num_seqs, _MAX_BLOCKS
    )
    return MemoryPlan(
        weights_bytes=0,
        kv_cache_bytes=0,
        free_bytes=0,
        bytes_per_token=0,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=min(longest, num_blocks * block_size),
    )
