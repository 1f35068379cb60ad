"""Requests wait for their images while others continue, and each text is the same as alone."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Set

import pytest

from engine.core import EngineCore
from engine.errors import (
    ContextLengthExceeded,
    EngineDead,
    Failure,
    InvalidParameter,
    RequestFailed,
    SleepRefused,
)
from engine.grammar.compiler import GrammarCompiler
from engine.images.types import Image
from engine.runner.protocol import LaunchedStep
from engine.types import EngineOutput, Grammar, Request, SamplingParams, StepPlan
from tests.engine.fakes import FakeRunner, expected_output, make_config, make_info
from tests.engine.grammar.test_compiling import SlowBackend

MAX_LEN = 100
PIECE_S = 0.03
PIECES = 12  # per image


class Clock:
    """A clock that only advances with the pieces."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Reader:
    """Reads images that are only a digest; an image that is no longer kept is dropped at once."""

    def __init__(self, clock: Clock, room: int) -> None:
        self.capacity = room
        self.kept: OrderedDict[bytes, int] = OrderedDict()
        self.read: list[bytes] = []  # images read to the end
        self.num_pieces = 0
        self.faults: dict[bytes, BaseException] = {}
        self._clock = clock
        self._wanted: Set[bytes] = frozenset()

    def num_cells(self, image: Image) -> int:
        return image.height * image.width

    def is_cached(self, image: Image) -> bool:
        return image.digest in self.kept

    def pin(self, digests: Set[bytes]) -> None:
        self._wanted = digests
        self.drop()

    def prefetch(self, image: Image) -> Iterator[None]:
        for number in range(PIECES):
            self._clock.now_s += PIECE_S
            self.num_pieces += 1
            if image.digest in self.faults and number == PIECES // 2:
                raise self.faults[image.digest]
            yield
        self.read.append(image.digest)
        self.kept[image.digest] = self.num_cells(image)
        self.drop()

    def drop(self) -> None:
        for digest in [each for each in self.kept if each not in self._wanted]:
            if sum(self.kept.values()) > self.capacity:
                del self.kept[digest]


class ReadingRunner(FakeRunner):
    """Reads ahead; an image that was not read is read by the step that computes its tokens."""

    def __init__(self, num_blocks: int, clock: Clock, room: int) -> None:
        super().__init__(make_info(num_blocks, 4, MAX_LEN))
        self.image_prefetcher = Reader(clock, room)
        self.in_steps: list[str] = []
        self.added: list[str] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        launched = super().launch(plan)
        self.added += [added.request.id for added in plan.added]
        for row in plan.rows:
            for image in self.rows[row.id].request.images:
                is_seen = row.start < image.start + image.num_tokens
                is_seen = is_seen and image.start < row.start + len(row.token_ids)
                if is_seen and not self.image_prefetcher.is_cached(image):
                    self.in_steps.append(row.id)
        return launched


class Rig:
    """An engine that reads images ahead."""

    def __init__(self, *, num_blocks: int = 200, room: int = 1000, grammars=None, **given) -> None:
        self.clock = Clock()
        self.runner = ReadingRunner(num_blocks, self.clock, room)
        self.reader = self.runner.image_prefetcher
        config = make_config(**given)
        self.core = EngineCore(config, self.runner, clock=self.clock, grammars=grammars)
        self.texts: dict[str, list[int]] = {}
        self.ends: dict[str, object] = {}

    def step(self) -> EngineOutput:
        output = self.core.step()
        for id_, tokens, reason in zip(
            output.ids, output.token_ids, output.finish_reasons, strict=True
        ):
            self.texts.setdefault(id_, []).extend(tokens)
            if reason is not None:
                assert id_ not in self.ends, "ended twice"
                self.ends[id_] = output.errors.get(id_, reason)
        return output

    def drain(self) -> None:
        while self.core.has_work:
            self.step()
        assert self.core.check() == []
        assert self.core.stats.blocks.held == 0


def show(name: str, digests: str = "", *, size: int = 5, length: int = 6, **fields) -> Request:
    """A request with images of these digests, a letter each."""
    prompt, images = [2, 3], []
    for digest in digests:
        images.append(
            Image(
                start=len(prompt),
                num_tokens=size,
                height=1,
                width=size,
                pixels=b"",
                digest=digest.encode(),
            )
        )
        prompt += [1] * size
    prompt += [4, len(name) % 7]
    fields.setdefault(
        "sampling", SamplingParams(seed=ord(name[-1]), max_tokens=length, ignore_eos=True)
    )
    return Request(id=name, prompt_token_ids=tuple(prompt), images=tuple(images), **fields)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_texts_are_those_alone(seed: int, overlap: bool) -> None:
    """Random requests, some aborted, share images in little or much memory."""
    rng = random.Random(seed)
    is_tight = seed % 2 == 0
    rig = Rig(
        num_blocks=14 if is_tight else 300,
        room=rng.choice([5, 12, 1000]),
        overlap=overlap,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice((3, 16, 64)),
        policy=rng.choice(("fcfs", "priority", "sjf", "lpm", "fair")),
    )
    left = [
        show(
            f"r{number}",
            "".join(rng.choices("abcdefg", k=rng.choice((0, 1, 1, 2, 3)))),
            size=rng.choice((1, 5)),
            length=rng.randint(1, 14),
            priority=rng.randrange(3),
            tenant=rng.choice("xy"),
            background=rng.random() < 0.2,
        )
        for number in range(24)
    ]
    requests = {request.id: request for request in left}
    while left or rig.core.has_work:
        if left and rng.random() < 0.4:
            rig.core.add(left.pop())
        if rng.random() < 0.05:
            rig.core.abort(rng.choice(sorted(requests)))
        if rig.core.idle_s:  # it is not stepped then
            assert left, "it would wait for ever"
            continue
        rig.step()
    assert not any(isinstance(end, Failure) for end in rig.ends.values())
    assert set(rig.ends) == set(requests)
    for id_, request in requests.items():
        if rig.ends[id_] != "abort":
            assert (rig.texts[id_], rig.ends[id_]) == expected_output(request, MAX_LEN)
    if not rig.core.stats.num_preemptions:  # after a preemption a prompt may be computed again
        assert not rig.runner.in_steps
    assert rig.core.check() == []
    if rig.reader.capacity == 1000:
        assert max(Counter(rig.reader.read).values()) == 1
    rig.core.add(show("last", "z"))
    rig.drain()
    assert sum(rig.reader.kept.values()) <= rig.reader.capacity


@pytest.mark.parametrize("overlap", [False, True])
def test_who_runs_has_its_next_token_after_a_few_pieces(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.core.add(show("text", length=30))
    rig.step()
    rig.core.add(show("image", "a"))
    while "a" not in map(bytes.decode, rig.reader.read):
        before, told = rig.reader.num_pieces, len(rig.texts.get("text", ()))
        rig.step()
        assert rig.reader.num_pieces - before <= 4
        assert len(rig.texts["text"]) > told or (overlap and told == 0)
    assert "image" not in rig.runner.added[:1]
    rig.drain()
    assert not rig.runner.in_steps
    assert len(rig.texts["image"]) == 6


def test_who_comes_while_an_image_is_read_is_served_before_it() -> None:
    rig = Rig()
    rig.core.add(show("image", "abc"))
    rig.step()
    assert rig.core.idle_s == 0.0
    rig.core.add(show("text"))
    rig.drain()
    assert list(rig.ends) == ["text", "image"]
    assert rig.runner.added == ["text", "image"]


def test_an_image_is_read_once_for_all_in_the_order_of_their_arrival() -> None:
    rig = Rig(max_num_seqs=8)
    for name, digests in [("1", "a"), ("2", "b"), ("3", "a"), ("4", "ba"), ("5", "c")]:
        rig.core.add(show(name, digests))
    rig.drain()
    assert rig.runner.added == ["1", "3", "2", "4", "5"]
    assert rig.reader.read == [b"a", b"b", b"c"]
    rig.core.add(show("6", "x"))
    rig.core.add(show("7", "ca"))  # whose images are already read
    rig.drain()
    assert rig.runner.added[5:] == ["7", "6"]


def test_an_image_that_nobody_waits_for_is_read_no_further() -> None:
    rig = Rig()
    rig.core.add(show("1", "a"))
    rig.core.add(show("2", "a"))
    rig.core.add(show("3", "b"))
    rig.step()
    rig.core.abort("1")
    rig.step()
    before = rig.reader.num_pieces
    assert 0 < before < PIECES
    rig.core.abort("2")
    rig.drain()
    assert rig.ends == {"1": "abort", "2": "abort", "3": "length"}
    assert rig.reader.read == [b"b"]
    assert rig.reader.num_pieces == before + PIECES


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestFailed("its embeddings are not finite"), "RequestFailed"),
        (MemoryError(), "OutOfMemory"),
        (RuntimeError("it is broken"), "RequestFailed"),
    ],
)
def test_an_image_that_cannot_be_read_fails_who_shows_it_alone(error, kind) -> None:
    rig = Rig()
    rig.reader.faults[b"b"] = error
    requests = [show("1", "a"), show("2", "ab"), show("3", "cb"), show("4", "c"), show("5")]
    for request in requests:
        rig.core.add(request)
    rig.drain()
    for request in requests:
        end = rig.ends[request.id]
        if any(image.digest == b"b" for image in request.images):
            assert isinstance(end, Failure)
            assert end.kind == kind
            assert end.message.startswith("an image could not be read: ")
        else:
            assert (rig.texts[request.id], end) == expected_output(request, MAX_LEN)


def test_a_lost_device_ends_the_engine() -> None:
    rig = Rig()
    rig.reader.faults[b"a"] = EngineDead("it is lost")
    rig.core.add(show("1", "a"))
    with pytest.raises(EngineDead):
        rig.drain()


def test_who_waits_for_an_image_can_be_late_or_ended() -> None:
    rig = Rig()
    rig.core.add(show("late", "a", deadline_s=rig.clock.now_s + 3 * PIECE_S))
    rig.core.add(show("ended", "b"))
    with pytest.raises(InvalidParameter, match="in use"):
        rig.core.add(show("ended"))
    with pytest.raises(SleepRefused):
        rig.core.sleep(1)
    while "late" not in rig.ends:
        rig.step()
    assert not rig.reader.read
    rig.core.fail_all(Failure(kind="EngineAsleep", message="bye"))
    rig.drain()
    assert [end.kind for end in rig.ends.values()] == ["DeadlineExceeded", "EngineAsleep"]
    rig.core.sleep(1)


def test_what_can_never_be_served_is_refused_before_its_images_are_read() -> None:
    rig = Rig()
    with pytest.raises(ContextLengthExceeded):
        rig.core.add(show("1", "a", length=MAX_LEN))
    assert not rig.core.has_work


def test_images_whose_tokens_are_cached_are_not_read() -> None:
    rig = Rig(room=5)
    rig.core.add(show("1", "abc"))
    rig.drain()
    assert rig.reader.read == [b"a", b"b", b"c"]
    assert len(rig.reader.kept) == 1
    rig.core.add(show("2", "abcd"))  # its first 16 tokens are cached
    rig.drain()
    assert rig.reader.read[3:] in ([b"d"], [b"c", b"d"])
    rig.core.add(show("3", "abcde", sampling=SamplingParams(max_tokens=1, prompt_logprobs=0)))
    rig.drain()
    assert {b"a", b"b"} <= set(rig.reader.read[4:])  # they are computed again


def test_no_more_is_read_ahead_than_there_is_room_for() -> None:
    """Even if a text runs for long and nothing else is admitted."""
    rig = Rig(room=12, max_num_seqs=1)
    rig.core.add(show("text", length=60))
    rig.step()
    for number in range(6):
        rig.core.add(show(f"i{number}", "abcdef"[number]))
    while "text" not in rig.ends:
        rig.step()
        assert sum(rig.reader.kept.values()) <= 12
    assert len(rig.reader.read) == 2
    rig.drain()
    assert not rig.runner.in_steps
    assert len(rig.reader.read) == 6


@pytest.mark.parametrize(
    ("policy", "fields", "order"),
    [
        ("fcfs", [{}, {"background": True}, {"priority": -1}, {}], ["0", "2", "3", "1"]),
        ("priority", [{}, {"priority": 1}, {"priority": -1}, {}], ["2", "0", "3", "1"]),
        ("fair", [{"tenant": "x"}] * 3 + [{"tenant": "y"}], ["0", "3", "1", "2"]),
    ],
)
def test_images_are_read_in_the_order_of_the_policy(policy, fields, order) -> None:
    rig = Rig(policy=policy)
    for number, own in enumerate(fields):
        rig.core.add(show(str(number), "abcd"[number], **own))
    rig.drain()
    assert [int(digest.hex(), 16) - 97 for digest in rig.reader.read] == list(map(int, order))


def test_work_in_the_background_takes_no_room_from_other() -> None:
    rig = Rig(room=5, max_num_seqs=1)
    rig.core.add(show("text", length=60))
    rig.step()
    rig.core.add(show("batch", "a", background=True))
    while not rig.reader.read:
        rig.step()
    rig.core.add(show("image", "b"))
    while len(rig.reader.read) < 2:
        rig.step()
        assert "text" not in rig.ends
    rig.drain()
    assert rig.runner.added == ["text", "image", "batch"]


def test_a_grammar_is_compiled_while_images_are_read() -> None:
    slow = SlowBackend()
    rig = Rig(grammars=GrammarCompiler(lambda: slow))
    held = SamplingParams(seed=1, max_tokens=6, grammar=Grammar("regex", "a"))
    rig.core.add(show("1", "a", sampling=held))
    rig.core.snapshot()
    slow.go.set()
    rig.drain()
    (life,) = rig.core.snapshot().requests
    kinds = [phase.kind for phase in life.phases]
    assert kinds[0] == "images"
    assert [kind for kind in kinds if kind != "grammar"] == [
        "images",
        "queued",
        "prefill",
        "decode",
    ]


def test_who_waits_is_told_of() -> None:
    rig = Rig()
    rig.core.add(show("1", "a", report_progress=True))
    output = rig.step()
    told = output.progress["1"]
    assert (told.processed, told.total) == (0, 9)
    assert output.stats.num_waiting == 1
    (life,) = rig.core.snapshot().requests
    assert [phase.kind for phase in life.phases] == ["images"]
    rig.drain()
    assert rig.core.stats.num_waiting == 0
