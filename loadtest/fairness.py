"""What a noisy API key costs a quiet one: ``python -m loadtest.fairness``.

The server has two keys of equal weight. Its capacity in requests per second is measured first, with
one key that always keeps enough in flight; half of that is a key's share. Then, in alternating
rounds, the quiet key sends part of its share at random times while the noisy key sends nothing, its
share, and many times its share. The quiet key's time to first token counts from the time a request
was due, and a rejected request counts as a failure. Rounds are pooled. The reported ratio is the
p99 under the greatest noise over the p99 with the noisy key at its share.

With several policies, each gets its own server, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from loadtest.client import Client, StreamRecord, raw_json
from loadtest.driver import Endpoint, Load, send_all
from loadtest.machine import describe_machine
from loadtest.process import running_server
from loadtest.summary import latencies, spread
from loadtest.workloads import PLAIN_TOKENS, Shape, draw_lengths, make_requests

_KEYS = {name: f"sk-load-{name}" for name in ("quiet", "noisy")}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and a line of JSON, and write the result to ``--out`` if given."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.fairness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("serve", nargs="*", help="after --: MODEL and flags of quire serve")
    add("--policies", default="fair,fcfs", help="of the scheduler, each on a server of its own")
    add("--noise", default="0,1,10", help="what the noisy key sends, in shares")
    add("--quiet-share", type=float, default=0.4, help="of its share that the quiet key sends")
    add("--in-flight", type=int, default=128, help="requests that measure what the server can do")
    add("--round-s", type=float, default=10.0)
    add("--rounds", type=int, default=3)
    add("--input-len", type=int, default=64)
    add("--output-len", type=int, default=32)
    add("--out", type=Path)
    options = parser.parse_args(argv)
    # A full collection with this many live objects takes up to a tenth of a second. First tokens
    # that arrive meanwhile would be seen late, and the delay charged to the server.
    gc.disable()
    policies = {}
    for policy in options.policies.split(","):
        with tempfile.TemporaryDirectory(prefix="quire-") as home:
            keys = Path(home) / "keys.yaml"
            keys.write_text(json.dumps({"keys": [_key_entry(name) for name in _KEYS]}))
            flags = [
                *(*options.serve, "--api-key-file", str(keys), "--data-dir", home),
                *("--scheduling-policy", policy, "--disable-log-requests"),
            ]
            with (
                running_server(flags, api_key=_KEYS["quiet"]) as server,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                policies[policy] = runner.run(_measure(server.url, options))
    result = {
        "load": {name: getattr(options, name) for name in ("input_len", "output_len")},
        "quiet_share": options.quiet_share,
        "rounds": {"count": options.rounds, "seconds": options.round_s},
        "server": options.serve,
        "policies": policies,
        "machine": describe_machine(),
    }
    _print_table(policies)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def _key_entry(name: str) -> dict[str, str]:
    return {"name": name, "sha256": hashlib.sha256(_KEYS[name].encode()).hexdigest()}


async def _measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds against one server."""
    bench = _Bench(url, options)
    await bench.open()
    capacity = await bench.capacity()
    share = capacity / 2
    levels = [float(level) for level in options.noise.split(",")]
    rounds: dict[float, list[list[StreamRecord]]] = {level: [] for level in levels}
    for index in range(options.rounds):
        for level in levels:
            rounds[level].append(await bench.round(share, level, f"{index} {level}"))
    bench.close()
    await asyncio.sleep(0.1)  # let the connections close before their event loop does
    noise = [_summary(level, records) for level, records in rounds.items()]
    most, fair = max(levels), 1.0 if 1.0 in levels else min(levels)
    p99 = {level: told["ttft_ms"]["p99"] for level, told in zip(levels, noise, strict=True)}
    return {
        "capacity_requests_per_s": capacity,
        "noise": noise,
        "p99_ratio": p99[most] / p99[fair],
    }


class _Bench:
    """Two keys of one server."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._options = options
        self._clients = {name: Client(url, api_key=key) for name, key in _KEYS.items()}
        self._endpoint: Endpoint | None = None

    async def open(self) -> None:
        """Look up the model's name and let the server warm up."""
        models = raw_json(await self._clients["quiet"].fetch("GET", "/v1/models"))
        model = models["data"][0]["id"]
        self._endpoint = Endpoint(False, model, {"temperature": 0, "ignore_eos": True})
        await self._send("quiet", 16, Load(concurrency=4), "warm-up")

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    async def capacity(self) -> float:
        """Requests per second that the server finishes when it always has enough of them."""
        concurrency = self._options.in_flight
        first = await self._send("noisy", concurrency, Load(concurrency=concurrency), "probe")
        rate = _rate(first)
        count = max(2 * concurrency, int(rate * self._options.round_s))
        return _rate(await self._send("noisy", count, Load(concurrency=concurrency), "capacity"))

    async def round(self, share: float, level: float, seed: str) -> list[StreamRecord]:
        """Run one round with the noisy key sending ``level`` shares; return the quiet records."""
        length_s, noise = self._options.round_s, None
        if level:
            count = int(share * level * (length_s + 2.0))
            noise = asyncio.create_task(
                self._send("noisy", count, Load(rate=share * level), f"noise {seed}")
            )
            await asyncio.sleep(1.0)  # let the noisy key fill the server first
        rate = share * self._options.quiet_share
        records = await self._send("quiet", int(rate * length_s), Load(rate=rate), seed)
        if noise is not None:
            noise.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await noise
            await asyncio.sleep(0.5)  # let the server notice the disconnected clients
        return records

    async def _send(self, who: str, count: int, load: Load, seed: str) -> list[StreamRecord]:
        assert self._endpoint is not None
        rng = random.Random(seed)
        shape = Shape("fixed", self._options.input_len, self._options.output_len)
        asks = make_requests(draw_lengths(shape, count, rng), rng, token_pool=PLAIN_TOKENS)
        return await send_all(self._clients[who], self._endpoint, asks, load, rng)


def _rate(records: Sequence[StreamRecord]) -> float:
    """Requests per second over the middle half of a run, leaving out ramp-up and drain."""
    ends = sorted(record.end_s for record in records if record.failure is None)
    quarter = len(ends) // 4
    return (len(ends) - 2 * quarter - 1) / (ends[-quarter - 1] - ends[quarter])


def _summary(level: float, rounds: Sequence[Sequence[StreamRecord]]) -> dict[str, Any]:
    records = [record for part in rounds for record in part]
    each = [spread(latencies(part)["ttft_ms"]) for part in rounds]
    return {
        "noise_shares": level,
        "requests": len(records),
        "failures": sum(record.failure is not None for record in records),
        "ttft_ms": spread(latencies(records)["ttft_ms"]),
        "itl_ms": spread(latencies(records)["itl_ms"]),
        "median_of_rounds_p99_ms": statistics.median(told["p99"] for told in each if told),
    }


def _print_table(policies: dict[str, Any]) -> None:
    print("policy  noise  requests  failed  ttft p50  ttft p99 (ms)", file=sys.stderr)
    for policy, told in policies.items():
        for row in told["noise"]:
            ttft = row["ttft_ms"]
            print(
                f"{policy:6}  {row['noise_shares']:5g}  {row['requests']:8}  {row['failures']:6}  "
                f"{ttft['p50']:8.1f}  {ttft['p99']:8.1f}",
                file=sys.stderr,
            )
        print(
            f"{policy:6}  p99 at most noise / at one share: {told['p99_ratio']:.2f}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
