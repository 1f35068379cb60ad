"""Send many requests for a long time, some streamed, some abandoned, and compare every answer.

    a few hundred requests, each alone ──► the expected answers
    thousands drawn of them, many at once ──► the actual answers, while memory, files, threads
                                              and the server's own counts are watched

No token may be lost, repeated or sent to the wrong request; usage is exact; output never stalls for
seconds; memory, files and threads do not grow; and at all times the accepted requests equal those
finished, failed, aborted and under way. With a KV pool that is much too small (``--
--num-gpu-blocks-override N``) all of this must hold through preemptions.

By default the model is a stub whose tokens depend on seed and position, so that the server is
tested and not the machine's arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from loadtest.client import Client, HttpError, raw_json
from loadtest.endurance.samples import Sample, growth_per_1000, leaks, longest_stall_s, take_sample
from loadtest.machine import describe_machine
from loadtest.process import RunningServer, running_server
from loadtest.scrape import scrape, scrape_when_idle
from loadtest.soak.answers import Answer, comparable_answer, first_difference, read_stream
from loadtest.workloads import PLAIN_TOKENS

_PATH = "/v1/completions"
_STUB = ("--load-format", "stub")
_SAMPLE_PERIOD_S = 0.25  # between two samples
_IDLE_S = 30.0
_BUSY_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_blocks_held")
_MAX_REPORTED = 20  # problems to report

# The limits to stay within.
_MAX_GROWTH_BYTES = 2**20  # per thousand requests
_MAX_STALLED_S = 5.0
_MAX_PREEMPTIONS = 8  # of one request
_MIN_REQUESTS_FOR_GROWTH = 2000  # requests needed to judge growth


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test and print the result as a line of JSON. Returns 0 if everything held."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.endurance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("serve", nargs="*", help="after --: MODEL and flags of quire serve")
    add("--real", action="store_true", help="serve the model itself in place of the stub")
    add("--requests", metavar="N", type=int, default=10_000)
    add("--minutes", metavar="M", type=float, help="go on for so long, whatever --requests says")
    add("--in-flight", metavar="N", type=int, default=64)
    add("--kinds", metavar="N", type=int, default=200, help="different requests to draw from")
    add("--longest", metavar="N", type=int, default=64, help="tokens of prompt and of output")
    add("--streamed", metavar="SHARE", type=float, default=0.5)
    add("--cancelled", metavar="SHARE", type=float, default=0.1)
    add("--seed", metavar="N", type=int, default=0)
    add("--out", metavar="FILE", type=Path)
    options = parser.parse_args(argv)
    flags = [*options.serve, *(() if options.real else _STUB), "--disable-log-requests"]
    with (
        running_server(flags) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        told = runner.run(_Endurance(server, options).run())
    told |= {"server": options.serve, "machine": describe_machine()}
    for problem in told["problems"]:
        print(problem, file=sys.stderr)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(told))
    return 1 if told["problems"] else 0


class _Endurance:
    """One test run against one server."""

    def __init__(self, server: RunningServer, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._client = Client(server.url)
        self._rng = random.Random(options.seed)
        self._kinds: list[tuple[dict[str, Any], Answer]] = []
        self._counts: Counter[str] = Counter()
        self._max_preemptions = 0
        self._problems: list[str] = []
        self._samples: list[Sample] = []
        self._end_s = 0.0

    async def run(self) -> dict[str, Any]:
        """Send each kind of request alone, then many at once, and return the findings."""
        model = raw_json(await self._client.fetch("GET", "/v1/models"))["data"][0]["id"]
        for number in range(self._options.kinds):
            body = self._draw(model, number)
            answer = raw_json(await self._client.fetch("POST", _PATH, body))
            self._check_usage(body, answer)
            self._kinds.append((body, comparable_answer(_PATH, answer)))
        begun_s = time.monotonic()
        if self._options.minutes:
            self._end_s = begun_s + 60 * self._options.minutes
        watch = asyncio.create_task(self._monitor())
        await asyncio.gather(*(self._worker() for _ in range(self._options.in_flight)))
        wall_s = time.monotonic() - begun_s
        watch.cancel()
        figures = await self._wait_until_idle()
        self._check_limits(figures)
        self._client.close()
        asked = self._counts["asked"]
        return {
            "requests": asked,
            **{name: self._counts[name] for name in ("answered", "streamed", "cancelled")},
            "wall_s": round(wall_s, 1),
            "requests_per_s": round(asked / wall_s, 1),
            "growth_bytes_per_1000": round(growth_per_1000(self._samples)),
            "longest_stall_s": round(longest_stall_s(self._samples), 1),
            "preemptions": round(figures.get("num_preemptions", 0.0)),
            "most_preemptions_of_one": self._max_preemptions,
            "num_problems": len(self._problems),
            "problems": self._problems[:_MAX_REPORTED],
        }

    def _draw(self, model: str, number: int) -> dict[str, Any]:
        """Draw a request with a unique seed and prompt."""
        rng, longest = self._rng, self._options.longest
        return {
            "model": model,
            "prompt": [*rng.choices(PLAIN_TOKENS, k=rng.randint(1, longest))],
            "max_tokens": rng.randint(1, longest),
            "temperature": rng.choice((0.0, 1.0)),
            "seed": 1000 * self._options.seed + number,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_timings": True,
        }

    async def _worker(self) -> None:
        options = self._options
        while time.monotonic() < self._end_s or (
            not options.minutes and self._counts["asked"] < options.requests
        ):
            self._counts["asked"] += 1
            body, wanted = self._rng.choice(self._kinds)
            streams = self._rng.random() < options.streamed
            if self._rng.random() < options.cancelled:
                await self._disconnect(body, streams=streams)
                continue
            try:
                answer = await self._answer(body, streams=streams)
            except (HttpError, OSError, TimeoutError, ValueError) as error:
                self._note(body, str(error) or type(error).__name__)
                continue
            self._counts["answered"] += 1
            self._counts["streamed"] += streams
            timings = answer["choices"][0].get("timings") or {}
            num_preemptions = timings.get("num_preemptions") or 0
            self._max_preemptions = max(self._max_preemptions, num_preemptions)
            found = first_difference(wanted, comparable_answer(_PATH, answer))
            if found is not None:
                self._note(body, f"{'streamed' if streams else 'at once'}, {found}")

    async def _answer(self, body: dict[str, Any], *, streams: bool) -> Answer:
        """The answer as one object. Raises ValueError if a stream does not end properly."""
        if not streams:
            return raw_json(await self._client.fetch("POST", _PATH, body))
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        return read_stream(_PATH, await self._client.fetch("POST", _PATH, asked))

    async def _disconnect(self, body: dict[str, Any], *, streams: bool) -> None:
        """Send a request and disconnect, usually before it has been answered."""
        self._counts["cancelled"] += 1
        with contextlib.suppress(HttpError, OSError, TimeoutError, ValueError):
            async with asyncio.timeout(self._rng.choice((0.001, 0.01, 0.05, 0.2))):
                await self._answer(body, streams=streams)

    async def _monitor(self) -> None:
        while True:
            figures = await scrape(self._client)
            if figures:
                answered = self._counts["answered"]
                sample = take_sample(self._server.pid, time.monotonic(), answered, figures)
                self._samples.append(sample)
                # A client that disconnects sends its next request before the server has noticed.
                if not 0 <= sample.num_open <= 2 * self._options.in_flight:
                    self._problems.append(f"{sample.num_open:.0f} sequences are under way")
            await asyncio.sleep(_SAMPLE_PERIOD_S)

    async def _wait_until_idle(self) -> Mapping[str, float]:
        """The server's metrics once it is idle; the last ones read if it stays busy."""
        figures = await scrape_when_idle(self._client, _BUSY_GAUGES, _IDLE_S)
        busy = {name: figures.get(name) for name in _BUSY_GAUGES}
        if any(value != 0 for value in busy.values()):
            self._problems.append(f"never idle: {busy}")
        return figures

    def _check_limits(self, figures: Mapping[str, float]) -> None:
        """Check the results against the limits after the run."""
        problems = self._problems
        num_taken = figures.get("request_prompt_tokens_count", 0.0)
        ended = {
            how: figures.get(f"request_{how}", 0.0) for how in ("success", "failed", "aborted")
        }
        if num_taken != sum(ended.values()):
            problems.append(f"{num_taken:.0f} sequences were accepted, and ended: {ended}")
        if ended["failed"]:
            problems.append(f"{ended['failed']:.0f} sequences failed")
        if self._max_preemptions > _MAX_PREEMPTIONS:
            problems.append(f"a request was preempted {self._max_preemptions} times")
        stalled_s = longest_stall_s(self._samples)
        if stalled_s > _MAX_STALLED_S:
            problems.append(f"no token for {stalled_s:.1f} s while some were waited for")
        if self._counts["answered"] >= _MIN_REQUESTS_FOR_GROWTH:
            problems += leaks(self._samples)
            growth = growth_per_1000(self._samples)
            if growth > _MAX_GROWTH_BYTES:
                problems.append(f"{growth / 2**20:.2f} MiB more with each thousand requests")

    def _check_usage(self, body: dict[str, Any], answer: Answer) -> None:
        """Check the usage of a reference answer, since other answers are compared with it."""
        usage, (choice,) = answer["usage"], answer["choices"]
        counts = usage["prompt_tokens"], usage["completion_tokens"], len(choice["token_ids"])
        if counts != (len(body["prompt"]), body["max_tokens"], body["max_tokens"]):
            self._note(body, f"tokens of prompt and output by usage, and of output: {counts}")

    def _note(self, body: dict[str, Any], problem: str) -> None:
        self._problems.append(f"{body}\n    {problem}")
