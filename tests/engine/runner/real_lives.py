"""One random life of an engine with a real model: its texts are those that each request has alone.

    requests ─► plain engine, one after the other, nothing cached or drafted ──► wanted
       └──────► engine with random limits and features, many at once ─────────► told
                steps fail, engines die, clients hang up, it sleeps in between

Engines are batch-invariant where the model allows it, and every bit of a log-probability has to
match. The others compute in float32, so that another order of summation hardly ever changes a
token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine import core as engine_core
from engine.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.core import EngineCore
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.load import load_backend
from engine.pass_budget import PassBudget
from engine.paths import default_model_dir
from engine.runner import load_runner
from engine.runner.protocol import LaunchedStep, Runner
from engine.speculation.proposer import Drafter
from engine.speculation.speculator import Speculator
from engine.streams import Stream, StreamTable
from engine.submission import pack, unpack
from engine.types import Request, StepPlan, StepResult, TokenLogprobs
from kernels.cpu.native import build
from tests import tiny_models, tiny_vision
from tests.engine.runner.life_requests import VOCAB, RequestMaker, save_adapters
from tests.engine.running import Guesser

MAX_LEN = 100
# Whether the kind is computed batch-invariantly in float32 too: it has no experts.
KINDS = {
    "llama": True,
    "mistral": True,
    "gemma3": True,
    "deepseek_v3": False,
    "gpt_oss": False,
    "qwen3_5_text": True,
    "falcon_h1": True,
    "lfm2_moe": False,
    "qwen3_vl": True,
    "qwen3_5": True,
}
_RECURRENT = ("qwen3_5_text", "falcon_h1", "lfm2_moe", "qwen3_5")
_SEEING = ("qwen3_vl", "qwen3_5")
_ADAPTED = ("llama", "qwen3_5_text")
_METHODS = ("ngram", "suffix", "draft", "oracle", "oracle", None, None)


class Answer(NamedTuple):
    """What a client has received."""

    embedding: bytes | None
    token_ids: list[int]
    reason: str | None
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


class RealLife:
    """Serves random requests with a tiny model in ``directory``, where it is saved if need be."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(f"real {seed}")
        self.kind = kind = rng.choice((*KINDS,))
        model = _saved(kind, directory)
        # Without native kernels, no CPU computes batch-invariantly.
        is_possible = KINDS[kind] and build.load() is not None
        self.is_invariant = rng.random() < 0.5 and is_possible
        method = rng.choice(_METHODS)
        draft = None
        if method == "draft":
            is_other = kind in (*_RECURRENT, *_SEEING)
            draft = _saved("llama", directory) if is_other else model
        speculation = None
        if method is not None:
            speculation = SpeculationConfig(
                method="ngram" if method == "oracle" else method,
                draft_model=draft,
                num_draft_tokens=rng.choice((1, 3, 5)),
                min_ngram=1,
                adaptive=rng.random() < 0.3,
            )
        self.has_oracle = method == "oracle"
        size = rng.choice((4, 8, 16))
        least = -(-MAX_LEN // size)
        codes, offload = rng.choice(("auto", "int8", "fp8")), rng.choice((0, 1 << 16))
        # A tiny difference may make another code of a number, and codes are far apart.
        codes = codes if self.is_invariant else "auto"
        offload = 0 if kind in _RECURRENT else offload
        self.plain = EngineConfig(
            model=model,
            tokenizer=str(default_model_dir()),  # its first tokens are bytes
            dtype="float32",
            device="cpu",
            num_threads=1,
            max_model_len=MAX_LEN,
            batch_invariant=self.is_invariant,
            enforce_eager=True,
            cache=CacheConfig(
                block_size=size, num_blocks=least + 1, dtype=codes, enable_prefix_caching=False
            ),
            scheduler=SchedulerConfig(max_num_seqs=1, overlap=False, max_step_passes=1),
        )
        self.config = msgspec.structs.replace(
            self.plain,
            enforce_eager=rng.random() < 0.3,
            speculation=speculation,
            lora=LoraConfig(max_loaded=1, max_on_host=1),
            cache=CacheConfig(
                block_size=size,
                num_blocks=rng.randint(least, 3 * least),
                dtype=codes,
                enable_prefix_caching=offload > 0 or rng.random() < 0.8,
                offload_bytes=offload,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=rng.choice((2, 3, 6)),
                max_num_batched_tokens=rng.choice((5, 9, 20, 64)),
                policy=rng.choice(("fcfs", "priority", "sjf", "lpm", "fair")),
                overlap=rng.random() < 0.5,
                max_step_passes=rng.choice((1, 4)),
            ),
        )
        self.fault_rate = rng.choice((0.0, 0.05))
        self.death_rate = rng.choice((0.0, 0.02))
        self.abort_rate = rng.choice((0.0, 0.02))
        self.is_replaying = False
        adapters = save_adapters(model) if kind in _ADAPTED else []
        self._maker = RequestMaker(rng, model, sees=kind in _SEEING, adapters=adapters)
        self._grammars = GrammarCompiler(lambda: load_backend(self.plain, self._info))
        self.wanted: dict[str, Answer] = {}
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        runner = load_runner(self.plain)
        self._info = runner.info
        alone = EngineCore(self.plain, runner, grammars=self._grammars)
        groups = self._maker.make()
        for request in (each for group in groups for each in group):
            if request.sampling.grammar is not None:  # now, as nothing may depend on a thread
                alone.compile(request.sampling.grammar)
            self.wanted[request.id] = _answer_alone(alone, request)
        table, streams = StreamTable(lambda request_id: None), dict[str, Stream]()
        core, rng = self._core(load_runner(self.config), table), self.rng
        while groups or core.has_work:
            while groups and rng.random() < 0.3:
                group = groups.pop(0)
                streams |= {stream.request_id: stream for stream in table.open(group)}
                for request in group:
                    core.add(request)
            if len(table) and rng.random() < self.abort_rate:
                core.abort(rng.choice([*table._streams]))
            if core.has_work and rng.random() < self.death_rate:
                core = self._successor(core, table)
            elif core.has_work:
                table.dispatch(core.step())
            elif rng.random() < 0.3:
                self._check_idle(core)
                core.sleep(rng.choice((0, 1, 2)))
                core.wake()
                self._watch(core._runner)
        self._check_idle(core)
        for id_, stream in streams.items():
            self._check(id_, stream)
        self.seen["accepted"] += core.stats.drafts.num_accepted_tokens
        self.seen["hits"] += core.stats.prefix_cache_hits

    # ------------------------------------------------------------ the engine under test

    def _core(self, runner: Runner, table: StreamTable) -> EngineCore:
        speculator = None
        if self.config.speculation is not None:
            oracle = _Oracle(self) if self.has_oracle else None
            speculator = Speculator(self.config.speculation, oracle)
        # Nothing depends on the clock, so that a life is the same every time.
        clock = iter(range(1 << 40))
        core = EngineCore(
            self.config,
            runner,
            clock=lambda: next(clock) / 1000,
            grammars=self._grammars,
            speculator=speculator,
        )
        core.on_begin = table.begin
        core._pass_budget = _RandomPasses(self.config.scheduler.max_step_passes or 1, self.rng)
        self._watch(runner)
        return core

    def _watch(self, runner: Any) -> None:
        """Let steps of ``runner`` fail at random, whether or not they have been computed."""
        launch = runner.launch

        def launch_or_fail(plan: StepPlan) -> LaunchedStep:
            self.seen["drafts"] += sum(row.num_drafts for row in plan.rows)
            self.seen["preempted"] += plan.num_preempted
            self.seen["passes"] += plan.num_passes > 1
            self.seen["restores"] += len(plan.restores)
            fails = not self.is_replaying and plan.rows and self.rng.random() < self.fault_rate
            step = launch(plan)
            self.seen["faults"] += bool(fails)
            if fails and self.rng.random() < 0.5:
                raise RuntimeError("a passing fault")
            return _FailedStep(step) if fails else step

        runner.launch = launch_or_fail

    def _successor(self, core: EngineCore, table: StreamTable) -> EngineCore:
        """An engine in place of one that has died, with what it is sent."""
        self.seen["deaths"] += 1
        successor = self._core(core._runner.sleep(0).wake(), table)
        for message in pack(table.adopt(table.pop_all())):
            for request in unpack(message.requests):
                successor.add(request)
        return successor

    # ------------------------------------------------------------ checks

    def _check_idle(self, core: EngineCore) -> None:
        core.step()
        assert core.check() == []
        assert core.stats.blocks.held == 0
        rows = core._runner._rows
        assert [len(rows), len(rows._held), len(rows.requests), len(rows.sampling.masks)] == [0] * 4

    def _check(self, id_: str, stream: Stream) -> None:
        told, wanted = _answer(stream), self.wanted[id_]
        if stream._error is not None:
            assert self.seen["deaths"] > 1
            assert "died too often" in str(stream._error)
        elif told.reason == "abort":
            assert told.token_ids == wanted.token_ids[: len(told.token_ids)]
        else:
            assert told[1:3] == wanted[1:3], f"another text: {id_}, {stream.request.sampling}"
            assert np.allclose(_numbers(told.embedding), _numbers(wanted.embedding), atol=2e-3)
            for ours, theirs in zip(told[3:], wanted[3:], strict=True):
                assert len(ours) == len(theirs)
                assert all(map(self._are_alike, ours, theirs)), id_
            self.seen["texts"] += 1
            self.seen["vectors"] += told.embedding is not None
            self.seen["images"] += bool(stream.request.images)
            self.seen["adapters"] += stream.request.adapter is not None
            self.seen["grammars"] += stream.request.sampling.grammar is not None

    def _are_alike(self, told: TokenLogprobs, wanted: TokenLogprobs) -> bool:
        if self.is_invariant:
            return told == wanted
        ours, theirs = ((each.logprob, *each.top_logprobs) for each in (told, wanted))
        pairs = zip(ours, theirs, strict=True)
        return told.token_id == wanted.token_id and all(abs(a - b) < 2e-3 for a, b in pairs)


def lives(seeds: range, directory: Path, patch: Any) -> Iterator[RealLife]:
    """Run lives, and yield each afterwards."""
    run_isolated = engine_core.run_isolated
    for seed in seeds:
        life = RealLife(seed, directory)

        def watched(*given: Any, life: RealLife = life) -> StepResult:
            life.is_replaying = True
            try:
                return run_isolated(*given)
            finally:
                life.is_replaying = False

        with patch.context() as own:
            own.setattr(engine_core, "run_isolated", watched)
            life.run()
        yield life


class _FailedStep:
    def __init__(self, step: LaunchedStep) -> None:
        self._step = step

    def result(self) -> StepResult:
        self._step.result()
        raise MemoryError("a passing fault")


class _RandomPasses(PassBudget):
    def __init__(self, most: int, rng: random.Random) -> None:
        super().__init__(most)
        self._rng = rng

    def max_passes(self, num_rows: int) -> int:
        return self._rng.randint(1, self._max_passes)


class _Oracle:
    """A proposer that knows the texts and is occasionally wrong."""

    def __init__(self, life: RealLife) -> None:
        self._life = life

    def begin(self, request: Request) -> Drafter:
        text = [*request.prompt_token_ids, *self._life.wanted[request.id].token_ids]
        return Guesser(text, self._life.rng, wrong=range(3, VOCAB))

    def finish(self, request: Request, token_ids: list[int]) -> None:
        pass


def _saved(kind: str, directory: Path) -> str:
    path = directory / kind
    if not path.exists():
        (tiny_vision if kind in _SEEING else tiny_models).save(kind, path)
    return str(path)


def _answer_alone(core: EngineCore, request: Request) -> Answer:
    table = StreamTable(lambda request_id: None)
    (stream,) = table.open([request])
    core.add(msgspec.structs.replace(request, fork_of=None))
    while core.has_work:
        table.dispatch(core.step())
    return _answer(stream)


def _answer(stream: Stream) -> Answer:
    return Answer(
        stream._embedding,
        list(stream._token_ids),
        stream._finish_reason,
        list(stream._logprobs),
        list(stream._prompt_logprobs),
    )


def _numbers(embedding: bytes | None) -> np.ndarray:
    return np.frombuffer(embedding or b"", np.float32)
