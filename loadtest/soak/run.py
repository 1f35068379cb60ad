"""Send requests to a plain server, then to one with the features under test, and compare.

    requests ─► plain server, one after the other, nothing cached ──► the expected answers
       └──────► server with the flags in question, many at once ────► the actual answers
                streamed or not, some of them abandoned

A greedy request has one answer, and a sampled one has one for its seed, no matter what else runs or
how the request is chunked, preempted, speculated or resumed. The model runs in float32, so that a
different order of summation almost never changes the chosen token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.client import Client, HttpError, raw_json
from loadtest.process import running_server
from loadtest.scrape import scrape, scrape_when_idle
from loadtest.soak.answers import Answer, comparable_answer, first_difference, read_stream
from loadtest.soak.request_generator import RequestGenerator, SoakRequest

_REFERENCE_FLAGS = ("--max-step-passes", "1", "--no-enable-prefix-caching", "--enforce-eager")
_COMMON_FLAGS = ("--dtype", "float32", "--disable-log-requests")
_IDLE_S = 30.0
_BUSY_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_blocks_held")
_TOKEN_COUNTERS = {"prompt_tokens": "prompt_tokens", "completion_tokens": "generation_tokens"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test. Returns 0 if all answers match and the server's counters agree."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("serve", nargs="*", help="after --: flags of quire serve for the server that is tried")
    add("--model", metavar="MODEL", help="what both serve (default: the embedded model)")
    add("--both", metavar="FLAGS", default="", help="flags of both: adapters, what changes numbers")
    add("--requests", metavar="N", type=int, default=200)
    add("--in-flight", metavar="N", type=int, default=32)
    add("--longest", metavar="N", type=int, default=64, help="tokens of output, at most")
    add("--vocab", metavar="N", type=int, default=1000, help="ids of tokens to draw from")
    add("--hang-up", metavar="SHARE", type=float, default=0.0, help="of requests, in their midst")
    add("--seed", metavar="N", type=int, default=0)
    options = parser.parse_args(argv)
    common = [*([options.model] if options.model else []), *_COMMON_FLAGS, *options.both.split()]
    with running_server([*common, *_REFERENCE_FLAGS]) as server:
        asks, wanted = asyncio.run(_reference_answers(server.url, options))
    with running_server([*common, *options.serve]) as server:
        told = asyncio.run(_Soak(server.url, asks, wanted, options).run())
    for problem in told.problems:
        print(problem)
    print(json.dumps({"requests": len(asks), "problems": len(told.problems), **told.counts}))
    return 1 if told.problems else 0


async def _reference_answers(
    url: str, options: argparse.Namespace
) -> tuple[list[SoakRequest], list[Answer]]:
    """The requests, and the answer to each when it runs alone."""
    client = Client(url)
    listed = raw_json(await client.fetch("GET", "/v1/models"))["data"]
    drawing = RequestGenerator(
        options.seed,
        [model["id"] for model in listed],
        vocab=options.vocab,
        longest=options.longest,
    )
    asks = [drawing.generate() for _ in range(options.requests)]
    wanted = [(await _answer(client, ask))[0] for ask in asks]
    client.close()
    return asks, wanted


async def _answer(
    client: Client, ask: SoakRequest, *, streams: bool = False
) -> tuple[Answer, Answer]:
    """The comparable part of an answer, and its usage. Raises ValueError for a truncated stream."""
    body = ask.body | {"stream": True} if streams else ask.body
    if streams and ask.path != "/v1/responses":
        body = body | {"stream_options": {"include_usage": True}}
    try:
        received = await client.fetch("POST", ask.path, body)
    except HttpError as error:
        return {"error": error.status}, {}
    answer = read_stream(ask.path, received) if streams else raw_json(received)
    return comparable_answer(ask.path, answer), answer.get("usage") or {}


@dataclass
class _SoakResult:
    """The outcome of a run."""

    problems: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)


class _Soak:
    """Sends every request once to the server under test."""

    def __init__(
        self,
        url: str,
        asks: Sequence[SoakRequest],
        wanted: Sequence[Answer],
        options: argparse.Namespace,
    ) -> None:
        self._client = Client(url)
        self._pending = list(zip(asks, wanted, strict=True))
        self._options = options
        self._rng = random.Random(f"ways {options.seed}")
        self._result = _SoakResult()
        self._usage: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()

    async def run(self) -> _SoakResult:
        """Send the requests, many at once, then check the server's counters and resources."""
        before = await scrape(self._client)
        await asyncio.gather(*(self._worker() for _ in range(self._options.in_flight)))
        after = await self._wait_until_idle()
        self._check_counters(before, after)
        self._client.close()
        gained = ("num_preemptions", "spec_decode_num_accepted_tokens", "request_aborted")
        self._result.counts |= {"answers": dict(self._answers)} | {
            name: round(after.get(name, 0.0) - before.get(name, 0.0)) for name in gained
        }
        return self._result

    async def _worker(self) -> None:
        while self._pending:
            ask, wanted = self._pending.pop()
            if self._rng.random() < self._options.hang_up:
                await self._disconnect(ask)
                continue
            streams = ask.can_stream and self._rng.random() < 0.6
            try:
                told, usage = await _answer(self._client, ask, streams=streams)
            except (OSError, TimeoutError, ValueError) as error:
                self._note(ask, str(error) or type(error).__name__)
                continue
            self._answers[str(told.get("error", "whole"))] += 1
            self._usage["prompt_tokens"] += usage.get("prompt_tokens", usage.get("input_tokens", 0))
            output = usage.get("completion_tokens", usage.get("output_tokens", 0))
            self._usage["completion_tokens"] += output
            if (found := first_difference(wanted, told)) is not None:
                self._note(ask, f"{'streamed' if streams else 'at once'}, {found}")

    async def _disconnect(self, ask: SoakRequest) -> None:
        """Send a request and disconnect, usually before it has been answered."""
        patience_s = self._rng.choice((0.001, 0.01, 0.05, 0.2, 1.0))
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(patience_s):
                await _answer(self._client, ask, streams=ask.can_stream)

    async def _wait_until_idle(self) -> Mapping[str, float]:
        """The server's metrics once it is idle.

        If it does not become idle in time, the last ones read; empty if the server is gone.
        """
        figures = await scrape_when_idle(self._client, _BUSY_GAUGES, _IDLE_S)
        busy = {name: figures.get(name) for name in _BUSY_GAUGES}
        if any(value != 0 for value in busy.values()):
            self._result.problems.append(f"never idle: {busy}")
        return figures

    def _check_counters(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Compare the server's counters with what clients received, if none disconnected."""
        if self._options.hang_up:
            return
        for name, counter in _TOKEN_COUNTERS.items():
            counted = round(after.get(counter, 0.0) - before.get(counter, 0.0))
            if counted != self._usage[name]:
                told = self._usage[name]
                self._result.problems.append(f"{name}: {counted} counted, {told} told")

    def _note(self, ask: SoakRequest, problem: str) -> None:
        self._result.problems.append(f"{ask}\n    {problem}")
