"""The wire format: messages round-trip however they are split, and garbage is rejected."""

from __future__ import annotations

import itertools
import socket
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import Failure
from engine.frames import (
    MAX_FRAME_BYTES,
    Abort,
    Configure,
    ControlReply,
    Fatal,
    FrameError,
    FrameReader,
    GetSnapshot,
    Loading,
    Message,
    Output,
    Ready,
    Shutdown,
    StartProfile,
    StopProfile,
    Submit,
    encode,
    receive,
)
from engine.stats import BlockStats, EngineStats
from engine.types import EngineOutput, Request, RequestTimings, SamplingParams, TokenLogprobs, Trace
from tests.engine.fakes import make_config, make_info

MESSAGES: list[Message] = [
    Configure(make_config("a model", policy="sjf")),
    Submit(
        (
            Request(
                id="r/1",
                prompt_token_ids=(1, 2**31),
                resumed_token_ids=(3,),
                sampling=SamplingParams(
                    temperature=0.3, seed=-(2**63), stop=("é",), logit_bias={7: -1.5}, max_tokens=0
                ),
                fork_of="r",
                cache_salt="tenant",
                arrival_s=12.5,
            ),
        )
    ),
    Abort(("a", "b")),
    StartProfile(64),
    StopProfile(),
    GetSnapshot(),
    ControlReply(Trace("traces/quire-profile.json.gz", 64), None),
    ControlReply(None, Failure(kind="ProfileRefused", message="no", code="profile_running")),
    Shutdown(),
    Loading(0.25, "weights"),
    Ready(make_info(8, 4, 100)),
    Output(
        EngineOutput(
            ids=("a", "b"),
            token_ids=((1, 2), ()),
            finish_reasons=(None, "error"),
            logprobs={"a": (TokenLogprobs(1, -0.5, 1, (1, 2), (-0.5, -1.0)),)},
            timings={"b": RequestTimings(1.0, 2.0, 3.0, 4.0, 5)},
            errors={"b": Failure(kind="InvalidParameter", message="no", param="prompt")},
            stats=EngineStats(num_running=1, blocks=BlockStats(total=8, held=3)),
        ),
        sent_s=12.5,
    ),
    Fatal("no such file", "ModelLoadError"),
]


@given(cuts=st.lists(st.integers(0, 2000), max_size=12))
@settings(deadline=None, max_examples=60)
def test_frames_come_whole_out_of_any_pieces(cuts: list[int]) -> None:
    stream = b"".join(map(encode, MESSAGES))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = FrameReader()
    received: list[Message] = []
    for start, end in itertools.pairwise(edges):
        received += reader.feed(stream[start:end])
    assert received == MESSAGES


@given(data=st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_garbage_is_refused_or_waited_for_but_never_believed(data: bytes) -> None:
    try:
        messages = FrameReader().feed(data)
    except FrameError:
        return
    for message in messages:  # random bytes may spell an Abort, but nothing else
        assert isinstance(message, Abort | Shutdown | Loading | Fatal)


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode(["submit", [{"id": 5}]]),
        msgspec.msgpack.encode(["no such tag", 1]),
        msgspec.msgpack.encode({"an": "object"}),
        encode(MESSAGES[1])[4:].replace(b"temperature", b"temperaturE") + b"\xc1",
        b"\x91" * 100_000,  # deeper than any of our messages
    ],
)
def test_a_frame_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(len(body).to_bytes(4, "little") + body)


def test_a_frame_that_claims_too_much_is_refused_before_it_comes() -> None:
    with pytest.raises(FrameError, match="long"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_receive_blocks_for_a_whole_message_and_sees_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame = encode(Abort(("x" * 100_000,)))

        def send() -> None:
            for start in range(0, len(frame), 7_001):
                theirs.sendall(frame[start : start + 7_001])
            theirs.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        reader = FrameReader()
        assert receive(ours, reader) == [Abort(("x" * 100_000,))]
        assert receive(ours, reader) == []
        sender.join()
