"""The server's own cost per streamed token: ``python -m loadtest.overhead``.

A server whose model emits predetermined tokens (``--load-format stub``) is loaded at several
concurrencies, and the CPU time of its processes is divided by the tokens received. What remains is
HTTP, the process boundary, the scheduler, the detokeniser and SSE. The client's own CPU time is
reported separately. On a machine with few cores, client and server share them, so tokens/s is a
lower bound; CPU time per token hardly depends on that.

There are two loads. *Paced*: each step sleeps for ``--step-ms``, as a model would compute, and
every token is an event of its own. *Flat out*: the engine runs ahead of its clients, and streams
merge tokens into events (``tokens_per_event`` says how many).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from loadtest.client import Client, raw_json
from loadtest.driver import Endpoint, Load, send_all
from loadtest.machine import cpu_s, describe_machine, own_cpu_s, process_tree
from loadtest.process import RunningServer, running_server
from loadtest.summary import summarize
from loadtest.workloads import PLAIN_TOKENS, Shape, draw_lengths, make_requests

_INPUT_LEN, _OUTPUT_LEN = 64, 128  # tokens; the overhead load


class _PacedLoad(NamedTuple):
    step_ms: float
    min_requests: int  # in one round
    requests_per_slot: int  # per request in flight


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and a line of JSON, and write the result to ``--out`` if given."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("serve", nargs="*", help="after --: MODEL and flags of quire serve")
    add("--concurrency", default="1,16,64,256")
    add("--step-ms", type=float, default=25.0, help="of the paced load")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--rounds", type=int, default=3, help="of each concurrency; medians count")
    add("--out", type=Path)
    options = parser.parse_args(argv)
    runs = []
    for pace in (_PacedLoad(options.step_ms, 4, 2), _PacedLoad(0.0, 32, 12)):
        stub = ("--load-format", "stub", "--stub-step-ms", str(pace.step_ms))
        with (
            running_server([*options.serve, *stub, "--disable-log-requests"]) as server,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runs += runner.run(_measure(server, pace, options))
    result = {
        "load": {"input_len": _INPUT_LEN, "output_len": _OUTPUT_LEN, "endpoint": options.endpoint},
        "server": options.serve,
        "runs": runs,
        "machine": describe_machine(),
    }
    _print_table(runs)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


async def _measure(
    server: RunningServer, pace: _PacedLoad, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The runs at one pace, one per concurrency."""
    client = Client(server.url)
    model = raw_json(await client.fetch("GET", "/v1/models"))["data"][0]["id"]
    endpoint = Endpoint(options.endpoint == "chat", model, {"temperature": 0, "ignore_eos": True})
    await _round(client, endpoint, server.pid, 64, pace, "warm-up")
    runs = []
    for concurrency in map(int, options.concurrency.split(",")):
        rounds = [
            await _round(client, endpoint, server.pid, concurrency, pace, f"{concurrency} {index}")
            for index in range(options.rounds)
        ]
        rounds.sort(key=lambda told: told["cpu_us_per_token"])
        runs.append(
            {
                "step_ms": pace.step_ms,
                "concurrency": concurrency,
                **rounds[len(rounds) // 2],
                "tokens_per_s": statistics.median(told["tokens_per_s"] for told in rounds),
                "rounds_cpu_us_per_token": [told["cpu_us_per_token"] for told in rounds],
            }
        )
    client.close()
    return runs


async def _round(
    client: Client, endpoint: Endpoint, pid: int, concurrency: int, pace: _PacedLoad, seed: str
) -> dict[str, Any]:
    """Run one load and return the CPU time that each of the server's processes spent on it."""
    count = max(pace.min_requests, pace.requests_per_slot * concurrency)
    rng = random.Random(seed)
    lengths = draw_lengths(Shape("fixed", _INPUT_LEN, _OUTPUT_LEN), count, rng)
    pool = None if endpoint.chat else PLAIN_TOKENS
    asks = make_requests(lengths, rng, token_pool=pool, tokens_per_word=2.0)
    before = {member: cpu_s(member) for member in process_tree(pid)}
    own_s, begun_s = own_cpu_s(), time.perf_counter()
    records = await send_all(client, endpoint, asks, Load(concurrency=concurrency), rng)
    wall_s, own_s = time.perf_counter() - begun_s, own_cpu_s() - own_s
    spent: dict[str, float] = {}
    for member, since_s in before.items():
        role = _role(member)
        spent[role] = spent.get(role, 0.0) + cpu_s(member) - since_s
    summary = summarize(records)
    tokens = summary["output_tokens"]
    if summary["failures"] or not tokens:
        raise RuntimeError(f"requests failed: {summary['failures']}")
    return {
        "requests": count,
        "tokens_per_s": tokens / wall_s,
        "tokens_per_event": tokens / summary["output_events"],
        "cpu_us_per_token": sum(spent.values()) / tokens * 1e6,
        "cpu_us_per_token_by_role": {
            role: seconds / tokens * 1e6 for role, seconds in sorted(spent.items()) if seconds
        },
        "client_cpu_us_per_token": own_s / tokens * 1e6,
        "cores_used": (sum(spent.values()) + own_s) / wall_s,
        "ttft_p50_ms": summary["ttft_ms"]["p50"],
        "itl_p99_ms": summary["itl_ms"]["p99"],
    }


def _role(pid: int) -> str:
    """The role of a server process, judged by the module that it runs."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "ended"
    if "engine.worker" in command:
        return "engine"
    return "template" if "template" in command else "api"


def _print_table(runs: Sequence[dict[str, Any]]) -> None:
    print("step ms  in flight  tokens/s  tokens/event  us/token  of which")
    for run in runs:
        parts = [f"{role} {us:.1f}" for role, us in run["cpu_us_per_token_by_role"].items()]
        print(
            f"{run['step_ms']:>7g} {run['concurrency']:>10} {run['tokens_per_s']:>9,.0f} "
            f"{run['tokens_per_event']:>13.2f} {run['cpu_us_per_token']:>9.1f}  {', '.join(parts)}"
        )


if __name__ == "__main__":
    sys.exit(main())
