"""What prefix-aware routing between engines saves: ``python -m loadtest.affinity``.

Conversations that start from one of a few system prompts grow turn by turn, each turn repeating
everything before it, with a fixed number of them in flight. They run first against one server with
several engines (``--data-parallel-size``), which picks the engine itself, and then against the same
number of single-engine servers, used in turn, as a load balancer without knowledge of prefixes
would. The result is a count, not a time: the prompt tokens computed out of all prompt tokens sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.client import Client, raw_json
from loadtest.machine import describe_machine
from loadtest.process import running_server
from loadtest.scrape import scrape
from loadtest.workloads import PLAIN_TOKENS


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and a line of JSON, and write the result to ``--out`` if given."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.affinity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("serve", nargs="*", help="after --: MODEL and flags of quire serve, of each engine")
    add("--engines", type=int, default=2)
    add("--conversations", type=int, default=48)
    add("--turns", type=int, default=6)
    add("--in-flight", type=int, default=12, help="conversations at once")
    add("--system-prompts", type=int, default=6)
    add("--system-len", type=int, default=256, help="tokens of each")
    add("--turn-len", type=int, default=64, help="tokens that a turn adds to its conversation")
    add("--output-len", type=int, default=8, help="tokens that are asked for")
    add("--out", type=Path)
    options = parser.parse_args(argv)
    flags = [*options.serve, "--disable-log-requests"]
    engines = options.engines
    together = _measure([[*flags, "--data-parallel-size", str(engines)]], options)
    in_turn = _measure([flags] * engines, options)
    result = {
        "routed": together,
        "in_turn": in_turn,
        "load": {
            name: getattr(options, name)
            for name in ("conversations", "turns", "in_flight", "system_prompts")
        }
        | {name: getattr(options, name) for name in ("system_len", "turn_len", "output_len")},
        "engines": engines,
        "server": options.serve,
        "machine": describe_machine(),
    }
    for name, told in (("one server, which chooses", together), ("servers in turn", in_turn)):
        share = told["computed"] / told["sent"]
        counted = f"{told['computed']:,} of {told['sent']:,} prompt tokens"
        print(f"{name:26} {counted} computed: {share:.1%}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def _measure(servers: Sequence[Sequence[str]], options: argparse.Namespace) -> dict[str, Any]:
    """Run all conversations against these servers, using the servers in turn."""
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running_server(flags)).url for flags in servers]
        return asyncio.run(_converse(urls, options))


async def _converse(urls: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    clients = [Client(url) for url in urls]
    model = raw_json(await clients[0].fetch("GET", "/v1/models"))["data"][0]["id"]
    before = [await scrape(client) for client in clients]
    turns = itertools.cycle(clients)
    room = asyncio.Semaphore(options.in_flight)

    async def talk(number: int) -> int:
        """Run one conversation and return the number of prompt tokens it sent."""
        rng = random.Random(f"system {number % options.system_prompts}")
        prompt = rng.choices(PLAIN_TOKENS, k=options.system_len)
        rng = random.Random(f"conversation {number}")
        sent = 0
        async with room:
            for _ in range(options.turns):
                prompt += rng.choices(PLAIN_TOKENS, k=options.turn_len)
                body = {
                    **{"model": model, "prompt": prompt, "max_tokens": options.output_len},
                    **{"temperature": 0, "ignore_eos": True},
                }
                await next(turns).fetch("POST", "/v1/completions", body)
                sent += len(prompt)
        return sent

    sent = sum(await asyncio.gather(*map(talk, range(options.conversations))))
    after = [await scrape(client) for client in clients]
    for client in clients:
        client.close()
    await asyncio.sleep(0.1)  # let the connections close before their event loop does
    found = sum(
        now["prefix_cache_hits"] - then.get("prefix_cache_hits", 0)
        for then, now in zip(before, after, strict=True)
    )
    return {"sent": sent, "computed": sent - int(found)}


if __name__ == "__main__":
    sys.exit(main())
