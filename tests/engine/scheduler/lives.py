"""One random life of an engine: requests arrive, leave and are preempted, and invariants must hold.

Half of the lives plan and launch each step before the result of the previous one is processed. Some
of these have several steps in flight, each with other sequences, as the stages of a pipeline do.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from engine.config import CacheConfig, SpeculationConfig
from engine.core import EngineCore
from engine.errors import ContextLengthExceeded
from engine.images.types import Image
from engine.kv_cache.host_tier import HostTier
from engine.pooling import PoolingParams
from engine.profiler import Spans
from engine.runner.protocol import LaunchedStep
from engine.scheduler.sequence import Sequence
from engine.speculation.speculator import Speculator
from engine.types import (
    PENDING_TOKEN,
    EngineInfo,
    EngineOutput,
    FinishReason,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
)
from tests.engine.fakes import (
    VOCAB,
    FakeRunner,
    expected_embedding,
    expected_output,
    make_config,
    make_info,
)
from tests.engine.scheduler.whims import Guesses, Lazy, RandomPassBudget, RandomPromptBudget, Whim
from tests.engine.stateful_fakes import StatefulLazy

MAX_STEPS = 3000


@dataclass
class _Told:
    """What a client has received for one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    embedding: bytes | None = None
    reason: FinishReason | None = None
    num_cached: list[int] = field(default_factory=list)


class Life:
    """An engine with random limits and random arrivals."""

    has_images = False  # some prompts have images
    has_whole_images = False  # all tokens of an image are computed in one step

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        size = rng.choice((1, 2, 4, 5))
        self.num_blocks = num_blocks = -(-rng.randint(16, 90) // size)
        self.max_len = rng.randint(16, 60)
        self.config = make_config(
            cache=CacheConfig(block_size=size, enable_prefix_caching=rng.random() < 0.85),
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice((1, 3, 8, 64)),
            policy=rng.choice(("fcfs", "priority", "sjf", "lpm", "fair", "fair")),
            overlap=seed % 2 == 1,
        )
        self.num_stages = random.Random(f"stages {seed}").choice((1, 1, 1, 2, 3))
        self.config = _replace(self.config, pipeline_parallel_size=self.num_stages)
        self.is_pipelined = self.num_stages > 1 and self.config.scheduler.overlap is not False
        self.limit = min(self.max_len, num_blocks * size)
        self.window = random.Random(seed).randint(1, 24) if seed % 5 >= 3 else None
        self.keeps_states = seed % 3 == 1 and random.Random(f"states {seed}").random() < 0.4
        max_idle = random.Random(seed).choice((None, None, 0, 3))
        self.num_host_blocks = random.Random(f"host {seed}").choice((0, 0, 1, 3, 10, 200))
        if not self.config.cache.enable_prefix_caching:
            self.num_host_blocks = 0
        num_states = num_snapshots = 0
        if self.keeps_states:  # models with states do not support the rest
            self.num_stages, self.window, self.num_host_blocks = 1, None, 0
            self.is_pipelined = False
            self.config = _replace(self.config, pipeline_parallel_size=1)
            num_states = self.config.scheduler.max_num_seqs
            if self.config.cache.enable_prefix_caching:
                num_snapshots = random.Random(f"lines {seed}").choice((0, 1, 2, 5, 5, 50))
        info = make_info(
            num_blocks,
            size,
            self.max_len,
            window=self.window,
            max_idle_blocks=max_idle,
            num_host_blocks=self.num_host_blocks,
            num_states=num_states,
            num_snapshots=num_snapshots,
            whole_images=self.has_whole_images,
        )
        self.runner = self._make_runner(info)
        self.now_s = 0.0  # advances by a second per step
        self.num_drafts = rng.choice((0, 1, 3, 5)) if seed % 3 == 2 else 0
        if self.keeps_states:
            self.num_drafts = random.Random(f"drafts {seed}").choice((0, 1, 3, 5))
        self.core = EngineCore(
            self.config,
            _Watched(self),
            clock=lambda: self.now_s,
            speculator=self._make_speculator() if self.num_drafts else None,
        )
        self.core._window = Whim(self)
        self.max_passes = 1
        if not self.is_pipelined:
            self.max_passes = random.Random(seed).choice((1, 2, 5, 9))
            self.core._pass_budget = RandomPassBudget(self)
        self.max_prompt_tokens: int | None = None  # of the last planned step
        self.core._prompt_budget = RandomPromptBudget(self)
        self.pool, self.scheduler = self.core._pool, self.core._scheduler
        self.admits = True
        self.aborted: str | None = None
        self.told: dict[str, _Told] = {}
        self.live: set[str] = set()
        self.num_to_come = rng.randint(1, 16)
        self.has_background = seed % 4 >= 2
        self.seen: Counter[str] = Counter()  # lets a test verify that all this happened
        self.num_made = 0

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if self.num_to_come and (not self.live or self.rng.random() < 0.5):
                self._arrive()
            self._step()
            if not self.num_to_come and not self.core.has_work:
                break
        assert not self.live, f"never ended: {sorted(self.live)}"
        assert self.pool.stats().held == 0, "blocks did not come back"
        if self.pool.tier is not None:
            self._check_tier(self.pool.tier)
        if self.pool.snapshots is not None:
            assert not self.pool.snapshots._pending, "snapshots that never came"
        self.core.step()
        self.core.step()
        assert not self.runner.rows, "the runner was not told to forget"

    def _check_tier(self, tier: HostTier) -> None:
        """With no step in flight, everything that left the device can be found."""
        stats = tier.stats(0, 0)
        assert stats.used <= self.num_host_blocks
        assert len(tier._evictable) == stats.used, "slots did not come back"

    def _make_speculator(self) -> Speculator:
        config = SpeculationConfig(
            method=self.rng.choice(("ngram", "suffix", "draft")),
            num_draft_tokens=self.num_drafts,
            min_ngram=1,
            adaptive=self.rng.random() < 0.5,
        )
        return Speculator(config, Guesses(self) if self.rng.random() < 0.7 else None)

    def _make_runner(self, info: EngineInfo) -> FakeRunner:
        return (StatefulLazy if self.keeps_states else Lazy)(info, self.rng)

    def _arrive(self) -> None:
        rng = self.rng
        self.num_to_come -= 1
        stem = (1, 2, 3, 4, 1, 2, 3, 5, 5, 5, 1, 2)[: rng.randint(0, 12)]
        tail = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, 12)))
        images = _images(rng) if self.has_images and len(stem) > 8 else ()
        sampling = SamplingParams(
            seed=rng.randrange(3),
            max_tokens=rng.choice((None, None, 0, 1, 5, 12, 20)),
            ignore_eos=rng.random() < 0.8,
            stop_token_ids=rng.choice(((), (), (), (5,))),
            logprobs=rng.choice((None, None, 0)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
            bad_token_ids=rng.choice(((), (), (), ((1, 2), (3, 3, 4), (5,)))),
        )
        salt, priority = rng.choice(("", "", "other")), rng.randrange(3)
        tenant = rng.choice(("", "t", "u"))
        deadline_s = self.now_s + rng.randrange(60) if rng.random() < 0.1 else None
        background = self.has_background and rng.random() < 0.5
        leader = f"r{self.num_made}"
        if rng.random() < 0.2:
            self._add(
                Request(
                    id=leader,
                    prompt_token_ids=stem + tail,
                    pooling=PoolingParams(
                        kind=rng.choice(("last", "mean", "mean", "cls", "max")),
                        normalize=False,
                    ),
                    priority=priority,
                    cache_salt=salt,
                )
            )
            self.num_made += 1
            return
        for index in range(rng.choice((1, 1, 1, 2, 4))):
            request = Request(
                id=leader if not index else f"{leader}/{index}",
                prompt_token_ids=stem + tail,
                images=images,
                sampling=_with_seed(sampling, index, rng),
                fork_of=leader if index else None,
                priority=priority,
                tenant=tenant,
                weight={"t": 0.5, "u": 3.0}.get(tenant, 1.0),
                background=background,
                cache_salt=salt,
                deadline_s=deadline_s,
            )
            self._add(self._resumed(request) if rng.random() < 0.2 else request)
        self.num_made += 1

    def _resumed(self, request: Request) -> Request:
        """A request as it would be resubmitted after the engine died halfway through it."""
        if not request.prompt_token_ids:
            return request
        output, _ = expected_output(request, self.limit)
        if len(output) < 2:
            return request
        return _replace(request, resumed_token_ids=tuple(output[: self.rng.randrange(len(output))]))

    def _add(self, request: Request) -> None:
        num_prompt = len(request.prompt_token_ids)
        wanted = request.sampling.max_tokens if request.pooling is None else 0
        fits = num_prompt + (1 if wanted is None else wanted) <= self.limit
        if not num_prompt:
            return  # rejected for another reason, tested elsewhere
        try:
            self.core.add(request)
        except ContextLengthExceeded:
            assert not fits, "refused, though it fits"
            return
        assert fits, "taken, though it can never fit"
        self.live.add(request.id)
        self.told[request.id] = _Told(request, list(request.resumed_token_ids))

    def _step(self) -> None:
        self.admits = self.rng.random() < 0.9
        self.aborted = None
        self.now_s += 1.0
        output = self.core.step()
        self._listen(output, self.aborted)
        # No step is planned after a failed one: up to two results may arrive before the next plan.
        assert not any(self._is_late(id_, 2.0) for id_ in self.live), "outlived its deadline"
        self._check_books()

    def meanwhile(self) -> None:
        """What happens while a step runs."""
        if self.live and self.aborted is None and self.rng.random() < 0.015:
            self.aborted = self.rng.choice(sorted(self.live))
            self.core.abort(self.aborted)

    def _listen(self, output: EngineOutput, aborted: str | None) -> None:
        assert len(set(output.ids)) == len(output.ids) == len(output.finish_reasons)
        sparse = (output.logprobs, output.prompt_logprobs, output.num_cached_tokens)
        sparse = (*sparse, output.embeddings)
        for column in (*sparse, output.stop_token_ids, output.timings, output.errors):
            assert set(column) <= set(output.ids), "news of a request that has no row"
        for id_, tokens, reason in zip(
            output.ids, output.token_ids, output.finish_reasons, strict=True
        ):
            assert id_ in self.live, "told of a request that has ended"
            told = self.told[id_]
            told.token_ids += tokens
            told.num_logprobs += len(output.logprobs.get(id_, ()))
            told.prompt_logprobs += [p.token_id for p in output.prompt_logprobs.get(id_, ())]
            told.embedding = output.embeddings.get(id_)
            if id_ in output.num_cached_tokens:
                told.num_cached.append(output.num_cached_tokens[id_])
            assert (reason is not None) == (id_ in output.timings)
            if reason is None:
                continue
            self.live.remove(id_)
            self.seen[reason] += 1
            self.seen["embeddings"] += told.embedding is not None
            self.seen["resumed"] += bool(told.request.resumed_token_ids)
            if reason == "abort":
                assert id_ == aborted, "aborted by nobody"
            elif reason == "error":
                assert self._is_late(id_), "failed before its deadline"
                assert output.errors[id_].kind == "DeadlineExceeded"
                text, _ = expected_output(told.request, self.limit)
                assert told.token_ids == text[: len(told.token_ids)], "its text was another one"
            elif told.request.pooling is not None:
                assert (told.token_ids, reason) == ([], "stop")
                assert told.embedding == expected_embedding(told.request), "another vector"
            else:
                self._check_text(told, reason, output.stop_token_ids.get(id_))

    def _is_late(self, request_id: str, slack_s: float = 0.0) -> bool:
        deadline_s = self.told[request_id].request.deadline_s
        return deadline_s is not None and deadline_s + slack_s <= self.now_s

    def _check_text(self, told: _Told, reason: FinishReason, stop_token: int | None) -> None:
        request = told.request
        sampling, prompt = request.sampling, request.prompt_token_ids
        text = (told.token_ids, reason)
        assert text == expected_output(request, self.limit), "the schedule changed the text"
        assert stop_token == (told.token_ids[-1] if reason == "stop" else None)
        num_new = len(told.token_ids) - len(request.resumed_token_ids)
        assert told.num_logprobs == (0 if sampling.logprobs is None else num_new)
        wanted = [] if sampling.prompt_logprobs is None else list(prompt[1:])
        assert told.prompt_logprobs == wanted, "a prompt's log-probabilities are not whole"
        assert len(told.num_cached) == 1, "cached tokens are told once"
        assert 0 <= told.num_cached[0] <= len(prompt)

    def check_plan(self, plan: StepPlan) -> None:
        scheduler, config = self.scheduler, self.config.scheduler
        assert not plan.is_empty
        # A row that runs again may compute what was copied for it the first time.
        num_again = sum(row.request.id in plan.removed for row in plan.added)
        extra = num_again * (self.max_len if self.keeps_states else self.pool.block_size - 1)
        extra += 4 if self.has_whole_images else 0  # after an image's first token
        assert plan.num_tokens <= config.max_num_batched_tokens + extra
        assert scheduler.num_running <= config.max_num_seqs
        newcomers = [row for row in plan.added if row.request.id not in plan.removed]
        assert self.admits or not newcomers, "admitted while the window was open"
        # A background newcomer is admitted last. Others may displace a background sequence, one of
        # a tenant that has more than its share, or one whose prompt is less urgent.
        may_displace = self.has_background or config.policy == "fair"
        displacing = [row.request for row in newcomers if not may_displace]
        if config.policy == "priority":
            lost = [self.told[id_].request.priority for id_ in scheduler.preempted(plan)]
            displacing = [one for one in displacing if one.priority >= min(lost, default=0)]
        displacing += [row.request for row in newcomers if row.request.background]
        assert not (displacing and plan.num_preempted), "took the place of one just preempted"
        for row in plan.rows:
            request = self.told[row.id].request
            longest = request.sampling.max_tokens if request.pooling is None else 0
            total = self.limit if longest is None else len(request.prompt_token_ids) + longest
            end = row.start + len(row.token_ids) + row.num_passes - 1
            assert end <= total, "computed beyond the end"
            if request.pooling is None:
                assert end < total or not row.is_sampled, "chosen beyond the end"
        self.seen["steps"] += 1
        self.seen["preemptions"] += plan.num_preempted
        self.seen["copies"] += len(plan.copies)
        self.seen["offloads"] += len(plan.offloads)
        self.seen["loads"] += len(plan.loads)
        self.seen["restores"] += len(plan.restores)
        self.seen["saves"] += len(plan.saves)
        self.seen["displaced"] += bool(newcomers and plan.num_preempted)
        self.seen["chunks"] += sum(not row.is_sampled for row in plan.rows)
        followers = [id_ for id_ in self.live if self.told[id_].request.sampling.depends_on_output]
        self.seen["following"] += len({row.id for row in plan.rows}.intersection(followers))
        self.seen["drafts"] += sum(row.num_drafts for row in plan.rows)
        self._check_passes(plan)
        self._check_prompts(plan)
        self.seen["pending"] += sum(row.token_ids[-1] == PENDING_TOKEN for row in plan.rows)
        if self.is_pipelined:
            self._check_micro_batch(plan)

    def _check_micro_batch(self, plan: StepPlan) -> None:
        """Check a step planned while others are in flight.

        It waits for the tokens that they choose, and takes no more than its share of the running
        sequences.
        """
        known = (token for row in plan.rows for token in row.token_ids)
        assert PENDING_TOKEN not in known, "planned before its token is known"
        newcomers = {row.request.id for row in plan.added}
        decoding = (row for row in plan.rows if len(row.token_ids) - row.num_drafts == 1)
        ahead = sum(row.is_sampled and row.id not in newcomers for row in decoding)
        share = -(-self.scheduler.num_running // self.num_stages)
        self.seen["shared out"] += len(self.core._in_flight) == self.num_stages - 1
        assert self.core._in_flight or ahead <= share or plan.num_preempted, (
            "more than a fair share"
        )

    def _check_prompts(self, plan: StepPlan) -> None:
        """Decoding rows do not wait for more prompt tokens than allowed."""
        is_again = plan is not self.scheduler._planned[-1].plan  # only parts of it
        if self.max_prompt_tokens is None or is_again:
            return
        lengths = {row.id: len(row.token_ids) - row.num_drafts for row in plan.rows}
        newcomers = {row.request.id for row in plan.added}
        decoding = {row.id for row in plan.rows if row.is_sampled and lengths[row.id] == 1}
        num_tokens = sum(length for length in lengths.values() if length > 1)
        most = self.max_prompt_tokens + (4 if self.has_whole_images else 0)
        assert not decoding - newcomers or num_tokens <= most
        self.seen["paced"] += bool(decoding - newcomers) and num_tokens == self.max_prompt_tokens

    def _check_passes(self, plan: StepPlan) -> None:
        counts = [row.num_passes for row in plan.rows]
        assert not counts or 1 <= min(counts) <= max(counts) <= self.max_passes
        if max(counts, default=1) > 1:
            assert not plan.added, "a newcomer waits for passes"
            assert not plan.num_preempted, "somebody waits for passes"
            assert self.scheduler.num_running == len(counts), "somebody waits for passes"
            running = self.scheduler._state.running.values()
            assert all(seq.first_token_s is not None for seq in running), "a first token waits"
        self.seen["passes"] += sum(count - 1 for count in counts)

    def _check_books(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        assert pool.check(scheduler.tables) == []
        stats = scheduler.stats()
        self.seen["shared"] += stats.blocks.shared > 0
        self.seen["passed"] += sum(table.num_freed > 0 for table in scheduler.tables)
        state = scheduler._state
        running = list(state.running.values())
        if self.window is not None:
            self._check_window(running)
        wasted = sum(seq.table.capacity - seq.num_computed for seq in running)
        assert stats.blocks.wasted_slots == wasted, "wasted slots are miscounted"
        spare = pool.block_size - 1 + max(self.num_drafts, self.max_passes - 1)
        assert wasted <= len(running) * spare, "a block was taken before its time"
        assert stats.num_running + stats.num_waiting == len(self.live)
        ahead = len(self.core._in_flight)
        for seq in state.sequences.values():
            assert seq.num_pending - seq.num_extra_passes <= ahead
            assert ahead or not seq.num_extra_passes
        waiting = [seq for seq in state.sequences.values() if seq.id not in state.running]
        assert scheduler.num_waiting_tokens == sum(len(seq.token_ids) for seq in waiting)

    def _check_window(self, running: list[Sequence]) -> None:
        """Blocks behind a sequence's window are freed, at most one filled block late."""
        assert self.window is not None
        size = self.pool.block_size
        for seq in running:
            kept = seq.num_confirmed - seq.table.num_freed * size
            assert kept < self.window + size, "a block behind the window is kept"


class BrokenContract(BaseException):
    """Not an Exception, so that the engine does not treat it as a fault of the runner."""


class _Watched:
    """The life's runner, watched by the life."""

    def __init__(self, life: Life) -> None:
        self.info = life.runner.info
        self._life = life

    def set_spans(self, spans: Spans) -> None:
        pass

    def prepare(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> LaunchedStep:
        try:
            self._life.check_plan(plan)
            return _WatchedStep(self._life.runner.launch(plan), self._life)
        except (AssertionError, LookupError, ValueError) as error:
            raise BrokenContract(str(error)) from error


@dataclass
class _WatchedStep:
    step: LaunchedStep
    life: Life

    def result(self) -> StepResult:
        self.life.meanwhile()
        return self.step.result()


def _images(rng: random.Random) -> tuple[Image, ...]:
    """None or one of two images, for the start of a prompt."""
    digest = rng.choice((b"", b"a", b"b"))
    image = Image(start=2, num_tokens=5, height=1, width=5, pixels=b"", digest=digest)
    return (image,) if digest else ()


def _with_seed(sampling: SamplingParams, index: int, rng: random.Random) -> SamplingParams:
    min_tokens = rng.choice((0, 0, 3)) if (sampling.max_tokens or 9) > 3 else 0
    seed = (sampling.seed or 0) + index
    return _replace(sampling, seed=seed, min_tokens=0 if sampling.max_tokens == 0 else min_tokens)


def _replace(struct, **changes):
    import msgspec

    return msgspec.structs.replace(struct, **changes)
