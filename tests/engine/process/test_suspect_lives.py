"""Random lives of a client whose engines die of one prompt, without processes.

Whatever the policy and the limits, that prompt's requests fail with the second death, the others
get their whole texts, and hardly any other fails.
"""

from __future__ import annotations

import random

from engine.config import CacheConfig, EngineConfig
from engine.core import EngineCore
from engine.requests import fan_out
from engine.runner.protocol import LaunchedStep
from engine.streams import Stream, StreamTable
from engine.submission import pack, unpack
from engine.types import Request, SamplingParams, StepPlan
from tests.engine.fakes import VOCAB, FakeRunner, expected_output, make_config, make_info

MAX_LEN = 190
POISON = (6, 6, 6, 6, 6)


class Death(BaseException):
    """Not an Exception, which the engine would survive."""


class _Deadly(FakeRunner):
    """Dies of requests with the prompt ``POISON`` when it computes a certain position of theirs."""

    def __init__(self, num_blocks: int, position: int) -> None:
        super().__init__(make_info(num_blocks, 4, MAX_LEN))
        self._position = position

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for row in plan.rows:
            if row.id.startswith("poison") and row.start + len(row.token_ids) > self._position:
                raise Death
        return super().launch(plan)


class _Life:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.config: EngineConfig = make_config(
            cache=CacheConfig(block_size=4),
            max_num_seqs=rng.choice((1, 2, 4, 16, 64)),
            max_num_batched_tokens=rng.choice((8, 64, 256)),
            policy=rng.choice(("fcfs", "priority", "sjf", "lpm", "fair")),
            overlap=rng.random() < 0.5,
        )
        self.num_blocks = rng.choice((50, 80, 300))
        self.position = rng.choice((0, 1, 5, 20, 40))
        self.to_come = [self._group(f"r{n}") for n in range(rng.choice((2, 5, 8, 20)))]
        self.to_come.insert(rng.randrange(len(self.to_come) + 1), self._group("poison"))
        self.table = StreamTable(lambda request_id: None)
        self.streams: dict[str, Stream] = {}
        self.num_deaths = 0

    def _group(self, name: str) -> list[Request]:
        """The choices of one prompt; no two prompts are the same."""
        rng, is_poison = self.rng, name == "poison"
        sampling = SamplingParams(
            n=rng.choice((1, 1, 3)),
            seed=rng.randrange(99),
            max_tokens=60 if is_poison else rng.choice((1, 5, 20, 60, 100)),
            ignore_eos=True,
        )
        tail = (rng.randrange(VOCAB) for _ in range(rng.randrange(8, 30)))
        prompt = POISON if is_poison else (1, *tail)
        return fan_out(name, prompt, sampling, priority=rng.randrange(3), tenant=rng.choice("tu"))

    def run(self) -> None:
        core = self._start_engine()
        while self.to_come or core.has_work:
            while self.to_come and self.rng.random() < 0.4:
                group = self.to_come.pop(0)
                self.streams |= {one.request_id: one for one in self.table.open(group)}
                for request in group:
                    core.add(request)
            if not core.has_work:
                continue
            assert not core.idle_s
            try:
                self.table.dispatch(core.step())
            except Death:
                self.num_deaths += 1
                core = self._start_engine()
                for message in pack(self.table.adopt(self.table.pop_all())):
                    for request in unpack(message.requests):
                        core.add(request)

    def _start_engine(self) -> EngineCore:
        core = EngineCore(self.config, _Deadly(self.num_blocks, self.position))
        core.on_begin = self.table.begin
        return core


def test_engines_die_of_a_prompt_twice_and_of_the_others_nearly_all_survive() -> None:
    num_failed = num_others = 0
    for seed in range(40):
        life = _Life(seed)
        life.run()
        assert life.num_deaths == 2
        for id_, stream in life.streams.items():
            if id_.startswith("poison"):
                assert stream._error is not None
                continue
            num_others += 1
            num_failed += stream._error is not None
            if stream._error is None:
                assert stream._token_ids == expected_output(stream.request, MAX_LEN)[0]
    assert num_failed <= num_others / 100
