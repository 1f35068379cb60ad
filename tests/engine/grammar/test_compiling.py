"""Compiling grammars: on a thread beside decoding, cached by size, checked in a killable child."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest

from engine.core import EngineCore
from engine.errors import Failure, InvalidParameter
from engine.grammar.check import GrammarChecker
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.llguidance_backend import LlguidanceBackend
from engine.requests import fan_out
from engine.sandbox.process import SandboxedProcess
from engine.text.tokenizer import Tokenizer
from engine.types import Grammar, SamplingParams
from tests.engine.fakes import FakeRunner, expected_output, make_config, make_info


class SlowBackend:
    """Compiles when told to; the text ``bad`` does not compile."""

    num_bytes = 10

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> SlowBackend:
        assert self.go.wait(30)
        self.compiled.append(grammar.text)
        if grammar.text == "bad":
            raise InvalidParameter("it is bad", param="grammar")
        return self

    def matcher(self) -> SlowBackend:
        return self


@pytest.fixture
def slow() -> Iterator[SlowBackend]:
    backend = SlowBackend()
    yield backend
    backend.go.set()


def make_core(slow: SlowBackend, overlap: bool = False, **scheduler: int) -> EngineCore:
    grammars = GrammarCompiler(lambda: slow)
    config = make_config(overlap=overlap, **scheduler)
    return EngineCore(config, FakeRunner(make_info(200, 4, 100)), grammars=grammars)


def held(name: str, text: str, n: int = 1) -> list:
    return fan_out(
        name, (1, 2, 3), SamplingParams(seed=1, n=n, max_tokens=6, grammar=Grammar("regex", text))
    )


def run(core: EngineCore, until: set[str]) -> dict[str, object]:
    """Step until these requests have ended; returns the outcome of all that have."""
    ends: dict[str, object] = {}
    while not until <= set(ends):
        assert core.has_work
        output = core.step()
        for id_, reason in zip(output.ids, output.finish_reasons, strict=True):
            if reason is not None:
                ends[id_] = output.errors.get(id_, reason)
    return ends


@pytest.mark.parametrize("overlap", [False, True])
def test_others_run_while_a_grammar_is_compiled(slow: SlowBackend, overlap: bool):
    core = make_core(slow, overlap)
    for request in held("held", "a", n=3):
        core.add(request)
    assert core.idle_s > 0, "nothing to do but to wait"
    (free,) = fan_out("free", (1, 2), SamplingParams(seed=1, max_tokens=20))
    core.add(free)
    assert set(run(core, {"free"})) == {"free"}
    slow.go.set()
    ends = run(core, {"held", "held/1", "held/2"})
    assert "stop" in ends.values() or "length" in ends.values()
    assert slow.compiled == ["a"], "once for all choices"
    assert not core.has_work
    assert core.check() == []


def test_who_waits_for_a_grammar_keeps_its_place_in_the_queue(slow: SlowBackend):
    core = make_core(slow, max_num_seqs=1)
    first, *behind = (
        fan_out(name, (1, 2), SamplingParams(seed=1, max_tokens=3)) for name in ("first", *"abc")
    )
    for requests in (first, held("held", "a"), *behind):
        core.add(*requests)
    core.step()
    slow.go.set()
    core.compile(Grammar("regex", "a"))  # and so it is ready before the first one ends
    assert list(run(core, {"first", "held", "a", "b", "c"})) == ["first", "held", "a", "b", "c"]


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(slow: SlowBackend):
    core = make_core(slow)
    for request in (*held("bad", "bad"), *held("good", "good")):
        core.add(request)
    slow.go.set()
    ends = run(core, {"bad", "good"})
    assert isinstance(ends["bad"], Failure)
    assert ends["bad"].kind == "InvalidParameter"
    assert ends["good"] in ("stop", "length")


def test_who_waits_for_a_grammar_can_be_aborted(slow: SlowBackend):
    core = make_core(slow)
    (request,) = held("held", "a")
    core.add(request)
    with pytest.raises(InvalidParameter, match="in use"):
        core.add(request)
    core.abort("held")
    assert run(core, {"held"}) == {"held": "abort"}
    assert not core.has_work


def test_an_id_in_use_is_refused_at_once_and_harms_its_owner_in_nothing(slow: SlowBackend):
    core = make_core(slow)
    (request,) = held("held", "a")
    plain = msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, grammar=None)
    )
    core.add(plain)
    with pytest.raises(InvalidParameter, match="in use"):
        core.add(request)
    slow.go.set()
    assert run(core, {"held"}) == {"held": expected_output(plain, 100)[1]}
    assert not core.has_work


def test_a_known_grammar_waits_for_nothing(slow: SlowBackend):
    core = make_core(slow)
    slow.go.set()
    core.compile(Grammar("regex", "a"))
    (request,) = held("held", "a")
    core.add(request)
    assert core.idle_s == 0
    output, reason = expected_output(request, 100)
    assert run(core, {"held"}) == {"held": reason}
    assert output


def test_the_cache_is_bounded_by_bytes_and_keeps_what_was_used_last(slow: SlowBackend):
    slow.go.set()
    compiler = GrammarCompiler(lambda: slow, max_cached_bytes=35)
    for text in ("a", "b", "c", "a", "d", "a", "b"):
        compiler.compile(Grammar("regex", text)).result()
    compiler.compile(Grammar("choice", "a")).result()
    compiler.compile(Grammar("regex", "a")).result()
    assert slow.compiled == ["a", "b", "c", "d", "b", "a"]
    assert compiler.num_bytes <= 35
    assert len(compiler) <= 3
    compiler.close()


@pytest.mark.slow
def test_five_thousand_schemas_leave_a_bounded_cache(backend: LlguidanceBackend):
    compiler = GrammarCompiler(lambda: backend)
    mask = np.zeros(-(-backend.vocab_size // 32), np.int32)
    before = psutil.Process().memory_info().rss
    for index in range(5000):
        text = f'{{"type": "object", "properties": {{"p{index}": {{"type": "string"}}}}}}'
        matcher = compiler.compile(Grammar("json_schema", text)).result().matcher()
        if index % 10 == 0:
            matcher.fill(mask)
    grown = psutil.Process().memory_info().rss - before
    assert compiler.num_bytes <= 64 * 2**20
    assert len(compiler) > 100
    assert grown <= 96 * 2**20, f"{grown / 2**20:.0f} MiB"
    compiler.close()


# ---------------------------------------------------------------- the library


def spell(backend: LlguidanceBackend, grammar: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    """Whether the grammar accepts a whole text, token by token under its masks."""
    matcher = backend.compile(grammar).matcher()
    mask = np.zeros(-(-backend.vocab_size // 32), np.int32)

    def allows(token: int) -> bool:
        matcher.fill(mask)
        return bool(mask.view(np.uint32)[token // 32] >> token % 32 & 1)

    for token in tokenizer.encode(text, add_special_tokens=False):
        if not allows(token):
            return False
        matcher.accept([token])
    return allows(tokenizer.eos_token_ids[0])


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("regex", r"\d+ (cats|dogs)"), ["3 cats", "12 dogs"], ["3 cat", "cats", "3  cats"]),
        (Grammar("choice", '["a.b", "é\\n"]'), ["a.b", "é\n"], ["axb", "a", "é"]),
        (Grammar("json_object"), ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}', "{}}"]),
        (Grammar("json_schema", '{"const": "x"}'), ['"x"'], ["x", '"y"', '"x" ']),
        (
            Grammar("json_schema", '{"type": "array"}'),
            ["[1,\n  2]", "[ 1 ]"],
            ["[1,\n\n2]", "[1,  2]"],
        ),
        (Grammar("lark", 'start: "<" %json {"type": "integer"} ">"'), ["<12>"], ["<x>", "<1"]),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_each_kind_allows_its_texts_and_no_others(
    backend: LlguidanceBackend,
    demo_tokenizer: Tokenizer,
    grammar: Grammar,
    good: list[str],
    bad: list[str],
):
    assert [text for text in good if not spell(backend, grammar, text, demo_tokenizer)] == []
    assert [text for text in bad if spell(backend, grammar, text, demo_tokenizer)] == []


def test_special_tokens_are_no_text(backend: LlguidanceBackend, demo_tokenizer: Tokenizer):
    """A string may contain the spelling of a special token, but never the token itself."""
    matcher = backend.compile(Grammar("json_schema", '{"type": "string"}')).matcher()
    mask = np.zeros(-(-backend.vocab_size // 32), np.int32)
    matcher.accept(demo_tokenizer.encode('"<', add_special_tokens=False))
    matcher.fill(mask)
    allowed = [i for i in range(backend.vocab_size) if mask.view(np.uint32)[i // 32] >> i % 32 & 1]
    assert not demo_tokenizer.special_ids.intersection(allowed)
    assert max(allowed) < demo_tokenizer.vocab_size, "logits without a token"


def test_tokens_can_be_taken_back(backend: LlguidanceBackend, demo_tokenizer: Tokenizer):
    matcher = backend.compile(Grammar("choice", '["one two", "one three"]')).matcher()
    mask, again = np.zeros((2, -(-backend.vocab_size // 32)), np.int32)
    matcher.accept(demo_tokenizer.encode("one", add_special_tokens=False))
    matcher.fill(mask)
    more = demo_tokenizer.encode(" two", add_special_tokens=False)
    matcher.accept(more)
    assert matcher.is_complete
    matcher.rollback(len(more))
    matcher.fill(again)
    assert not matcher.is_complete
    assert (mask == again).all()


# ---------------------------------------------------------------- the checking process


@pytest.fixture
async def checker():
    made = GrammarChecker()
    yield made
    made.close()


async def test_a_verdict_is_remembered(checker: GrammarChecker):
    good, bad = Grammar("regex", "a+"), Grammar("regex", "(")
    assert await checker.check(good) is None
    refusal = await checker.check(bad)
    assert refusal is not None
    assert refusal.code is None
    checker._idle.clear()  # no idle child left
    assert await checker.check(good) is None
    assert await checker.check(bad) == refusal


async def test_a_child_that_takes_too_long_is_killed_and_the_next_is_asked():
    checker = GrammarChecker(limit_s=0.5)
    try:
        assert await checker.check(Grammar("regex", "a")) is None
        child = checker._idle[-1]._child
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        refusal = await checker.check(Grammar("regex", "b"))
        assert refusal is not None
        assert refusal.code == "grammar_timeout"
        assert child.poll() is not None
        assert await checker.check(Grammar("regex", "c")) is None
    finally:
        checker.close()


async def test_a_killed_child_is_replaced(checker: GrammarChecker):
    assert await checker.check(Grammar("regex", "a")) is None
    for process in checker._idle:
        if process._child is not None:
            os.kill(process._child.pid, signal.SIGKILL)
            process._child.wait()
    assert await checker.check(Grammar("regex", "b")) is None


async def test_a_child_that_is_killed_at_work_is_replaced_and_asked_again(checker: GrammarChecker):
    assert await checker.check(Grammar("regex", "a")) is None
    child = checker._idle[-1]._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    asked = asyncio.create_task(checker.check(Grammar("regex", "b")))
    await asyncio.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    assert await asked is None


async def test_what_is_not_a_grammars_fault_is_not_remembered(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
):
    grammar = Grammar("regex", "good[a-z]+")

    def call(*_: object) -> None:
        raise OSError("no more descriptors")

    with monkeypatch.context() as patch:
        patch.setattr(SandboxedProcess, "call", call)
        refusal = await checker.check(grammar)
    assert refusal is not None
    assert await checker.check(grammar) is None


@pytest.mark.parametrize(("kept_s", "num_calls"), [(60.0, 1), (0.0, 2)])
async def test_a_time_out_is_remembered_for_a_while(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch, kept_s: float, num_calls: int
):
    grammar, calls = Grammar("regex", "late[a-z]+"), []

    def call(*_: object) -> None:
        calls.append(None)
        raise TimeoutError

    monkeypatch.setattr("engine.grammar.check._TIMEOUT_KEPT_S", kept_s)
    monkeypatch.setattr(SandboxedProcess, "call", call)
    for _ in range(2):
        refusal = await checker.check(grammar)
        assert refusal is not None
        assert refusal.code == "grammar_timeout"
    assert len(calls) == num_calls
