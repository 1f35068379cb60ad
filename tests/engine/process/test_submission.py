"""Requests with images reach the engine complete, their pixels once and in frames of their own."""

from __future__ import annotations

import asyncio

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.frames import FrameReader, Submit, encode
from engine.images.types import Image
from engine.link import EngineLink
from engine.submission import pack, unpack
from engine.types import Request

PIXELS = bytes(3000)
IMAGE = Image(start=0, num_tokens=1, height=10, width=100, pixels=PIXELS, digest=b"d" * 32)


def group(name: str, num_choices: int, has_images: bool) -> list[Request]:
    leader = Request(id=name, prompt_token_ids=(9,), images=(IMAGE,) * has_images)
    forks = [
        msgspec.structs.replace(leader, id=f"{name}/{i}", fork_of=name)
        for i in range(1, num_choices)
    ]
    return [leader, *forks]


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), max_size=6))
def test_what_is_unpacked_is_what_was_packed(groups: list[tuple[int, bool, bool]]) -> None:
    requests: list[Request] = []
    for number, (num_choices, has_images, leader_ended) in enumerate(groups):
        requests += group(str(number), num_choices, has_images)[leader_ended:]
    messages = pack(requests)
    crossed = FrameReader().feed(b"".join(map(encode, messages)))
    submits = [message for message in crossed if isinstance(message, Submit)]
    arrived = [one for submit in submits for one in unpack(submit.requests)]
    assert arrived == requests


def test_choices_share_the_pixels_and_prompts_do_not_share_a_frame() -> None:
    requests = [*group("a", 3, True), *group("b", 2, False), *group("c", 2, True)]
    messages = pack(requests)
    assert [[r.id for r in message.requests] for message in messages] == [
        ["a", "a/1", "a/2", "b", "b/1"],
        ["c", "c/1"],
    ]
    assert [encode(message).count(PIXELS) for message in messages] == [1, 1]
    assert pack([]) == []


class _Sink(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data


async def test_a_link_leaves_them_apart() -> None:
    link, sink = EngineLink(lambda output: None), _Sink()
    link.connection_made(sink)
    for message in (*pack(group("a", 1, False)), *pack(group("b", 1, False))):
        link.send(message)
    for message in (*pack(group("c", 2, True)), *pack(group("d", 1, True))):
        link.send(message)
    link.flush()
    sent = FrameReader().feed(sink.data)
    assert [[r.id for r in m.requests] for m in sent if isinstance(m, Submit)] == [
        ["a", "b"],
        ["c", "c/1"],
        ["d"],
    ]
