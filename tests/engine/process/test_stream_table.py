"""The table of live streams counts exactly the tokens that its streams hold."""

from __future__ import annotations

import random
import time

import pytest

from engine.errors import EngineDead, Failure, RequestFailed
from engine.streams import Stream, StreamTable
from engine.types import EngineOutput, FinishReason, Request, RequestTimings, SamplingParams


def request(number: int, rng: random.Random, leader: str | None) -> Request:
    return Request(
        id=f"request-{number}",
        prompt_token_ids=tuple(range(rng.randint(1, 50))),
        resumed_token_ids=tuple(range(rng.choice((0, 0, 7)))),
        sampling=SamplingParams(seed=number),
        fork_of=leader,
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_counted_are_those_of_the_streams(seed: int) -> None:
    """Through steps, ends, failures, aborts, and engine deaths."""
    rng = random.Random(seed)
    tables = [StreamTable(lambda id: None) for _ in range(2)]
    live: list[dict[str, Stream]] = [{}, {}]
    for number in range(400):
        at = rng.randrange(2)
        table, streams = tables[at], live[at]
        ids = list(streams)
        match rng.choices(("open", "step", "abort", "die", "end all"), (40, 45, 10, 4, 1))[0]:
            case "open":
                leader = rng.choice(ids) if ids and rng.random() < 0.3 else None
                (stream,) = table.open([request(number, rng, leader)])
                streams[stream.request_id] = stream
            case "step":
                told = rng.sample(ids, rng.randint(0, len(ids)))
                reasons: list[FinishReason | None] = [
                    rng.choice((None, None, None, "length", "error")) for _ in told
                ]
                ended = dict(zip(told, reasons, strict=True))
                failure = Failure.of(RequestFailed("why"))
                table.dispatch(
                    EngineOutput(
                        ids=("unknown", *told),
                        token_ids=((1,), *(tuple(range(rng.randint(0, 5))) for _ in told)),
                        finish_reasons=(None, *reasons),
                        errors={id: failure for id in told if ended[id] == "error"},
                    )
                )
                live[at] = {id: stream for id, stream in streams.items() if not ended.get(id)}
            case "abort" if ids:
                streams[rng.choice(ids)].abort()
            case "die":
                orphans = table.pop_all()
                live[at] = {}
                for adopted in tables[1 - at].adopt(orphans):
                    live[1 - at][adopted.id] = streams[adopted.id]
            case "end all":
                table.fail_all(EngineDead("gone"))
                live[at] = {}
        for table, streams in zip(tables, live, strict=True):
            assert len(table) == len(streams)
            assert table.num_tokens == sum(stream.num_tokens for stream in streams.values())


def test_of_requests_with_an_id_in_use_none_is_opened() -> None:
    """They are never sent: in the table they would count, and another engine would get them."""
    table = StreamTable(lambda id: None)
    a, b, c = (Request(id=id, prompt_token_ids=(1, 2)) for id in "abc")
    table.open([a])
    for refused in ([b, a], [b, c, b]):
        with pytest.raises(ValueError, match="in use"):
            table.open(refused)
    assert (len(table), table.num_tokens) == (1, 2)
    assert len(table.open([b, c])) == 2


async def test_a_resumed_request_has_its_first_token_before_its_end() -> None:
    """A lagging reader may see a token later than the engine's timestamp of the end."""
    table = StreamTable(lambda id: None)
    late, early = table.open([Request(id=id, prompt_token_ids=(1,)) for id in "ab"])
    table.dispatch(EngineOutput(ids=("b",), token_ids=((3, 4),), finish_reasons=(None,)))
    StreamTable(lambda id: None).adopt(table.pop_all())
    now_s = time.monotonic()
    timings = RequestTimings(now_s - 4, now_s - 3, now_s - 2, now_s - 1)
    later = RequestTimings(now_s, now_s + 1, now_s + 2, now_s + 3)
    assert await first_token_s(late, timings) == timings.first_token_s
    assert await first_token_s(early, later) <= now_s, "it came before the engine died"


async def first_token_s(stream: Stream, timings: RequestTimings) -> float:
    """The time to first token reported for a text that ends with these timings."""
    stream.push((5,), None)
    stream.set_timings(timings)
    stream.push((6,), "length")
    told = (await stream.next()).timings
    assert told is not None
    return told.first_token_s
