"""A runner without tensors that checks the content of every KV slot it reads.

It knows only what the row contract of ``engine/runner/protocol.py`` tells it. Each slot holds a
digest of the whole prefix up to its token (and of the salt, which must keep prefixes apart), and a
row may attend to its slots only if they hold the digests of its own tokens. The next token depends
only on the prefix and the seed, so whatever the scheduler does, each request must get the text of
``expected_output``.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.client import LoadProgress
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import Failure, ModelLoadError
from engine.images.types import EdgeScaling, ImageRules
from engine.plan_rows import ScheduledRow
from engine.pooling import PoolingInfo, PoolingParams
from engine.profiler import Spans
from engine.runner.protocol import CompletedStep, LaunchedStep, SleepingRunner
from engine.types import (
    DRAFT_TOKEN,
    PENDING_TOKEN,
    Adapter,
    EngineInfo,
    MemoryPlan,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

VOCAB = 7  # small, so that shared prefixes and stop tokens are common
EOS = 6
_MASK = 2**61 - 1


def make_info(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    *,
    vocab_size: int = VOCAB,
    window: int | None = None,
    max_idle_blocks: int | None = None,
    num_host_blocks: int = 0,
    num_states: int = 0,
    num_snapshots: int = 0,
    whole_images: bool = False,
) -> EngineInfo:
    return EngineInfo(
        model="fake",
        architecture="fake",
        num_parameters=0,
        dtype="float32",
        device="cpu",
        attention_backend="none",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        memory=MemoryPlan(
            weights_bytes=0,
            kv_cache_bytes=0,
            free_bytes=0,
            bytes_per_token=0,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_idle_blocks=max_idle_blocks,
            num_host_blocks=num_host_blocks,
            num_states=num_states,
            num_snapshots=num_snapshots,
        ),
        fingerprint="fake",
        load_s=0.0,
        window=window,
        is_recurrent=num_states > 0,
        pooling=PoolingInfo(kind="mean", size=2, num_labels=1),
        images=ImageRules(
            token_id=1,
            cell=1,
            scaling=EdgeScaling(1),
            max_images=1,
            is_bidirectional=whole_images,
        ),
    )


def make_config(
    model: str = "fake", cache: CacheConfig | None = None, **scheduler: object
) -> EngineConfig:
    cache = cache or CacheConfig(block_size=4)
    scheduler.setdefault("max_step_passes", 1)
    return EngineConfig(model=model, scheduler=SchedulerConfig(**scheduler), cache=cache)


def _roll(digest: int, token: int) -> int:
    return (digest * 1_000_003 + token * 7_919 + 12_345) & _MASK


def _choose(digest: int, output: Sequence[int], sampling: SamplingParams) -> int:
    """The next token: a function of prefix, seed and position."""
    num_output = len(output)
    mixed = (digest ^ ((sampling.seed or 0) * 0x9E3779B97F4A7C15)) & _MASK
    token = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64 >> 33
    banned = set(_stop_ids(sampling)) if num_output < sampling.min_tokens else set()
    for *before, last in sampling.bad_token_ids:
        if before == list(output[num_output - len(before) :]):
            banned.add(last)
    allowed = [t for t in range(VOCAB) if t not in banned] or [0]
    return allowed[token % len(allowed)]


def _stop_ids(sampling: SamplingParams) -> tuple[int, ...]:
    return (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,)))


def shown(request: Request) -> list[int]:
    """The prompt's tokens, with the content of images in place of their tokens."""
    found = list(request.prompt_token_ids)
    for image in request.images:
        for place in range(image.start, image.start + image.num_tokens):
            found[place] = VOCAB + image.digest[0] + 256 * (place - image.start)
    return found


def expected_output(request: Request, max_len: int) -> tuple[list[int], str]:
    """The expected output of ``request``, including resumed tokens, and the finish reason."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    digest = 0
    for token in (*shown(request), *request.resumed_token_ids):
        digest = _roll(digest, token)
    output = list(request.resumed_token_ids)
    limit = max_len - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
    while len(output) < limit:
        output.append(_choose(digest, output, sampling))
        digest = _roll(digest, output[-1])
        if output[-1] in _stop_ids(sampling) and len(output) >= sampling.min_tokens:
            return output, "stop"
    return output, "length"


def expected_embedding(request: Request) -> bytes:
    """The expected vector of ``request``."""
    params, prompt = request.pooling, request.prompt_token_ids
    assert params is not None
    digests, digest = [], 0
    for token in prompt:
        digest = _roll(digest, token)
        digests.append(digest)
    return pool(params, digests, 0, len(prompt)) or b""


def pool(params: PoolingParams, digests: list[int], start: int, num_prompt: int) -> bytes | None:
    """What tokens with these digests, the first at ``start``, add to their prompt's vector."""
    states = [(float(digest % 1021), float(digest % 509)) for digest in digests]
    if params.kind == "last":
        chosen = states[-1] if start + len(states) == num_prompt else None
    elif params.kind == "cls":
        chosen = states[0] if start == 0 else None
    else:
        # A token's share of the mean is a whole number, and so exact in chunks of any length.
        gather = max if params.kind == "max" else sum
        chosen = (gather(x for x, _ in states), gather(y for _, y in states))
    return None if chosen is None else struct.pack("<2f", *chosen)


@dataclass
class _Row:
    request: Request
    tokens: list[int]
    shown: list[int]  # content of its prompt
    digests: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    newest: int | None = None  # the last token it sampled
    seen_from: int = 0  # the first position that its future tokens can see

    def digest(self, position: int) -> tuple[str, int]:
        while len(self.digests) <= position:
            previous, place = self.digests[-1] if self.digests else 0, len(self.digests)
            seen = self.shown if place < len(self.shown) else self.tokens
            self.digests.append(_roll(previous, seen[place]))
        return self.request.cache_salt, self.digests[position]


class FakeRunner:
    """Runs plans; an ``AssertionError`` names the clause of the contract that a plan violates."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._size = info.memory.block_size
        self.rows: dict[str, _Row] = {}
        self.slots: dict[int, tuple[str, int]] = {}
        self.host: dict[int, list[tuple[str, int] | None]] = {}  # whole blocks

    @property
    def info(self) -> EngineInfo:
        return self._info

    def set_spans(self, spans: Spans) -> None:
        pass

    def prepare(self) -> bool:
        return False

    def load_adapter(self, adapter: Adapter) -> None:
        raise OverflowError("this adapter is bad")

    def sleep(self, level: int) -> SleepingRunner:
        return FakeResting(self._info, FakeRunner)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return CompletedStep(self._run(plan))

    def _run(self, plan: StepPlan) -> StepResult:
        for request_id in plan.removed:
            self.rows.pop(request_id, None)
        planned = {row.id for row in plan.rows}
        assert len(planned) == len(plan.rows), "a sequence has two rows"
        for added in plan.added:
            assert added.request.id not in self.rows, "added twice"
            assert added.request.id in planned, "added without a row"
            num_states = self._info.memory.num_states
            assert not num_states or len(self.rows) < num_states, "more rows than states"
            prompt = added.request.prompt_token_ids
            row = _Row(added.request, [*prompt, *added.output_ids], shown(added.request))
            self.rows[added.request.id] = row
        for planned_row in plan.rows:
            self._extend(planned_row)
        self._exchange(plan)
        for copy in plan.copies:
            for offset in range(self._size):
                source = self.slots.get(copy.source * self._size + offset)
                if source is not None:
                    self.slots[copy.target * self._size + offset] = source
        self._write(plan)
        for planned_row in plan.rows:
            self._attend(planned_row)
        return self._result(plan)

    def _extend(self, planned: ScheduledRow) -> None:
        row = self.rows[planned.id]
        row.table += planned.new_block_ids
        num_known = len(planned.token_ids) - planned.num_drafts
        assert num_known > 0, "an empty row"
        if planned.num_drafts:
            assert planned.is_sampled, "drafts that nobody judges"
            assert num_known == 1, "drafts behind more than the newest token"
            assert planned.token_ids[0] >= 0, "drafts behind a token that is on its way"
        for position, token in enumerate(planned.token_ids[:num_known], planned.start):
            if token == PENDING_TOKEN:
                assert not row.request.sampling.depends_on_output, "chosen blindly"
                assert position == len(row.tokens), "pending, but not behind the last token"
                assert row.newest is not None, "pending, but never sampled"
                token = row.newest
            if position == len(row.tokens):
                row.tokens.append(token)
            assert row.tokens[position] == token, "a token that is not the sequence's own"
        for draft in planned.token_ids[num_known:]:
            row.tokens.append(len(row.tokens) * 5 % VOCAB if draft == DRAFT_TOKEN else draft)
        row.seen_from = self._first_seen(planned.start)
        held = self._held(row)
        assert len(set(held)) == len(held), "a block is in one table twice"

    def _exchange(self, plan: StepPlan) -> None:
        """Copy blocks to the host, then load blocks from it."""
        for block, slot in plan.offloads:
            assert 0 <= slot < self._info.memory.num_host_blocks, "no such slot of the host"
            first = block * self._size
            self.host[slot] = [self.slots.get(first + offset) for offset in range(self._size)]
        targets = [target for _, target in plan.loads]
        assert len(set(targets)) == len(targets), "two loads into one block"
        for slot, block in plan.loads:
            assert slot in self.host, "loaded from where nothing was left"
            for offset, held in enumerate(self.host[slot]):
                if held is not None:
                    self.slots[block * self._size + offset] = held

    def _write(self, plan: StepPlan) -> None:
        holders = Counter(block for row in self.rows.values() for block in self._held(row))
        written: set[int] = set()
        for planned in plan.rows:
            row = self.rows[planned.id]
            for position in range(planned.start, planned.start + len(planned.token_ids)):
                block = row.table[position // self._size]
                assert 0 <= block < self._info.memory.num_blocks, "no such block"
                slot = self._slot(row, position)
                assert holders[block] == 1 or self.is_again(row, position), (
                    "a shared block is written"
                )
                assert slot not in written, "two tokens in one slot"
                written.add(slot)
                self.slots[slot] = row.digest(position)

    def is_again(self, row: _Row, position: int) -> bool:
        """Whether a shared slot may be written: a recomputed row may write the same content."""
        return False

    def _first_seen(self, position: int) -> int:
        window = self._info.window
        return 0 if window is None else max(0, position - window + 1)

    def _held(self, row: _Row) -> list[int]:
        return row.table[row.seen_from // self._size :]

    def _attend(self, planned: ScheduledRow) -> None:
        row = self.rows[planned.id]
        end = planned.start + len(planned.token_ids)
        for position in range(self._first_seen(planned.start), end):
            held = self.slots.get(self._slot(row, position))
            assert held == row.digest(position), f"{planned.id} reads foreign KV at {position}"
        rules = self.info.images
        if rules is not None and rules.is_bidirectional:
            for image in row.request.images:
                behind = image.start + image.num_tokens
                assert not image.start < end < behind, f"{planned.id} sees a part of an image"
        # A row that is not planned again must not block itself or others.
        row.seen_from = self._first_seen(end - planned.num_drafts)

    def num_made(self, planned: ScheduledRow) -> int:
        """How many of a row's passes the runner makes."""
        return planned.num_passes

    def _result(self, plan: StepPlan) -> StepResult:
        ids, tokens, logprobs = [], [], []
        prompt_logprobs, pooled = {}, {}
        for planned in plan.rows:
            row, end = self.rows[planned.id], planned.start + len(planned.token_ids)
            prompt, sampling = row.request.prompt_token_ids, row.request.sampling
            if sampling.prompt_logprobs is not None:
                positions = range(planned.start + 1, min(end, len(prompt) - 1) + 1)
                if positions:
                    prompt_logprobs[planned.id] = tuple(
                        TokenLogprobs(prompt[position], -float(position), 1)
                        for position in positions
                    )
            if row.request.pooling is not None:
                assert not planned.is_sampled, "sampled, where a vector is asked for"
                row.digest(end - 1)
                digests = row.digests[planned.start : end]
                part = pool(row.request.pooling, digests, planned.start, len(prompt))
                if part is not None:
                    pooled[planned.id] = part
            if planned.is_sampled:
                assert end == len(row.tokens), "sampled before the last token"
                chosen = self._choose(row, end - planned.num_drafts)
                # Its next token comes behind the accepted drafts.
                row.seen_from = self._first_seen(end - planned.num_drafts + len(chosen) - 1)
                if planned.num_passes > 1:
                    chosen += self._go_on(planned, chosen)
                row.newest = chosen[-1]
                ids.append(planned.id)
                tokens.append(tuple(chosen))
                first = end - planned.num_drafts
                told = tuple(TokenLogprobs(t, -float(at), 1) for at, t in enumerate(chosen, first))
                logprobs.append(told if sampling.logprobs is not None else None)
        return StepResult(tuple(ids), tuple(tokens), tuple(logprobs), prompt_logprobs, pooled)

    def _choose(self, row: _Row, position: int) -> list[int]:
        """The tokens from ``position`` on: the accepted drafts and one more."""
        prompt, sampling = row.request.prompt_token_ids, row.request.sampling
        row.digest(len(row.tokens) - 1)
        chosen: list[int] = []
        while True:
            output = row.tokens[len(prompt) : position]
            chosen.append(_choose(row.digests[position - 1], output, sampling))
            if position == len(row.tokens) or row.tokens[position] != chosen[-1]:
                del row.tokens[position:], row.digests[position:]
                return chosen
            position += 1

    def _go_on(self, planned: ScheduledRow, newest: list[int]) -> list[int]:
        """The tokens of a row's later passes, which must not write blocks that others share."""
        assert len(planned.token_ids) == 1, "passes of more than a token"
        row, chosen = self.rows[planned.id], list(newest)
        sampling = row.request.sampling
        assert sampling.is_plain, "a token that depends on more than its position"
        for position in range(planned.start + 1, planned.start + self.num_made(planned)):
            row.tokens.append(chosen[-1])
            block = row.table[position // self._size]
            holders = sum(block in self._held(other) for other in self.rows.values())
            assert holders == 1, "a shared block is written"
            self.slots[self._slot(row, position)] = row.digest(position)
            for seen in range(self._first_seen(position), position + 1):
                held = self.slots.get(self._slot(row, seen))
                assert held == row.digest(seen), f"{planned.id} reads foreign KV at {seen}"
            row.seen_from = self._first_seen(position + 1)
            chosen += self._choose(row, position + 1)
        return chosen[len(newest) :]

    def _slot(self, row: _Row, position: int) -> int:
        return row.table[position // self._size] * self._size + position % self._size


class FakeResting:
    """Wakes as a runner with empty slots.

    Weights are a JSON text, as engines are loaded with; ``refuse`` in it is the reason to reject
    them.
    """

    def __init__(self, info: EngineInfo, make: Callable[[EngineInfo], FakeRunner]) -> None:
        self.info = info
        self._make = make

    def release(self) -> None:
        pass

    def wake(self) -> FakeRunner:
        return self._make(self.info)

    def with_weights(self, model: str) -> FakeResting:
        if refusal := json.loads(model).get("refuse"):
            raise ModelLoadError(refusal)
        generation = self.info.generation + 1
        info = msgspec.structs.replace(
            self.info, model=model, generation=generation, fingerprint=f"fake {generation}"
        )
        return FakeResting(info, self._make)


class FaultyRunner(FakeRunner):
    """A runner that fails on demand: ``fault(plan)`` raises, or names rows as not finite.

    If ``late()`` is true, the fault is raised by the result and leaves wrong tokens on the device.
    """

    def __init__(
        self,
        info: EngineInfo,
        fault: Callable[[StepPlan], dict[str, Failure] | None],
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(info)
        self._fault = fault
        self._late = late

    def sleep(self, level: int) -> SleepingRunner:
        return FakeResting(self._info, lambda info: FaultyRunner(info, self._fault, self._late))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        result = self._run(plan)  # faults come after blocks are written, rows extended
        try:
            errors = self._fault(plan) or {}
        except Exception as error:
            if not self._late():
                raise
            for row in plan.rows:
                self.rows[row.id].newest = EOS - (self.rows[row.id].newest or 0)
            return _Broken(error, lambda: self._damage(plan))
        kept = [index for index, id_ in enumerate(result.ids) if id_ not in errors]
        return CompletedStep(
            StepResult(
                tuple(result.ids[i] for i in kept),
                tuple(result.token_ids[i] for i in kept),
                tuple(result.logprobs[i] for i in kept),
                result.prompt_logprobs,
                {id_: part for id_, part in result.pooled.items() if id_ not in errors},
                errors,
            )
        )

    def _damage(self, plan: StepPlan) -> None:
        """Corrupt everything that a failed step has copied."""
        for _, slot in plan.offloads:
            self.host[slot] = [("damaged", 0)] * self._size
        for _, block in plan.loads:
            for offset in range(self._size):
                self.slots[block * self._size + offset] = ("damaged", 0)


@dataclass
class _Broken:
    error: Exception
    damage: Callable[[], None]

    def result(self) -> StepResult:
        self.damage()
        raise self.error


def load(config: EngineConfig, on_progress: LoadProgress | None) -> FakeRunner:
    """The factory of engine processes under test; ``config.model`` is JSON with behaviours."""
    options = json.loads(config.model)
    if on_progress is not None:
        on_progress(0.5, "half of nothing")
    time.sleep(options.get("load_s", 0.0))
    if "refuse" in options:
        raise ModelLoadError(options["refuse"])
    if flag := options.get("die_unless_first"):  # a file that the first engine creates
        if os.path.exists(flag):
            os._exit(7)
        open(flag, "w").close()
    info = make_info(options.get("num_blocks", 64), config.cache.block_size, 200)
    generation = config.generation
    fingerprint = f"fake {generation}" if generation else info.fingerprint
    info = msgspec.structs.replace(
        info, model=config.model, generation=generation, fingerprint=fingerprint
    )
    if options.get("tells_device"):
        info = msgspec.structs.replace(info, architecture=config.device)

    def fault(plan: StepPlan) -> None:
        time.sleep(options.get("step_s", 0.0))
        if plan.rows and (path := options.get("hang_unless")) and not os.path.exists(path):
            open(path, "w").close()
            ctypes.PyDLL(None).sleep(600)  # holds the GIL, as a hung driver may
        for row in plan.rows:
            if row.id == options.get("kill"):
                os._exit(9)
            if row.id == options.get("raise"):
                raise RuntimeError("this row is bad")

    return FaultyRunner(info, fault)
