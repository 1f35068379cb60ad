"""Runs one load in rounds that alternate between the sides (A B A B), and summarises them."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.client import Client
from loadtest.cpu.loads import CpuLoad
from loadtest.cpu.servers import MODEL_NAME
from loadtest.driver import Endpoint, Load, send_all
from loadtest.machine import busy_cpu_s, own_cpu_s, tree_cpu_s
from loadtest.process import RunningServer
from loadtest.summary import summarize
from loadtest.workloads import SampleRequest

_ENDPOINT = Endpoint(False, MODEL_NAME, {"temperature": 0.0, "ignore_eos": True})
# Cores used by neither the server nor this client. Above this share a round counts as disturbed.
# (The server's own use says less: a load of one sequence need not fill all cores.)
_MAX_FOREIGN_CORES = 0.1
_IDLE_S = 5.0  # for which an idle server is watched
_REPORTED = ("tokens_per_s", "itl_p99_ms", "server_cores", "foreign_cores")
_MEDIANS = ("tokens_per_s", "wall_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "server_cores")


def measure_load(
    sides: Mapping[str, RunningServer], load: CpuLoad, *, vocab: int, rounds: int, tries: int = 3
) -> dict[str, dict[str, Any]]:
    """Return, by side, the rounds and their medians.

    All sides get the same prompts in one round and new ones in the next. All sides but the first,
    which is Quire, are paused while another one runs. A disturbed round is repeated, up to
    ``tries`` times in all, and marked if it stays disturbed.

    Raises:
        RuntimeError: a side did not answer every request in full.
    """
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(-1, rounds):  # round -1 warms up
        for index, (name, server) in enumerate(sides.items()):
            if index:
                server.resume()
            try:
                if number < 0:
                    _round(server, _warm_up(load, vocab), load.concurrency)
                    continue
                result = _run_round_with_retries(server, load, vocab, number, tries)
            except RuntimeError as error:
                raise RuntimeError(f"{name}, {load.key}: {error}") from None
            finally:
                if index:
                    server.pause()
            taken[name].append(result)
            told = ", ".join(f"{key} {result[key]:.2f}" for key in _REPORTED)
            print(f"  {load.key} round {number + 1} {name}: {told}", file=sys.stderr, flush=True)
    return {
        name: {
            **{key: statistics.median(each[key] for each in results) for key in _MEDIANS},
            "rounds": results,
        }
        for name, results in taken.items()
    }


def idle_share(server: RunningServer) -> float:
    """The share of one core that the server uses while it has no requests."""
    time.sleep(1.0)  # let work left over from the last requests finish
    before_s = tree_cpu_s(server.pid) or 0.0
    time.sleep(_IDLE_S)
    return ((tree_cpu_s(server.pid) or 0.0) - before_s) / _IDLE_S


def _warm_up(load: CpuLoad, vocab: int) -> list[list[SampleRequest]]:
    """A full batch of requests with a few output tokens each."""
    asks = [ask for wave in load.waves(vocab, random.Random("warm-up")) for ask in wave]
    return [[SampleRequest(ask.prompt, 8) for ask in asks[: load.concurrency]]]


def _run_round_with_retries(
    server: RunningServer, load: CpuLoad, vocab: int, number: int, tries: int
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for attempt in range(tries):
        rng = random.Random(f"{load.key} {number} {attempt}")
        result = _round(server, load.waves(vocab, rng), load.concurrency)
        if result["foreign_cores"] <= _MAX_FOREIGN_CORES:
            return {**result, "disturbed": False}
    return {**result, "disturbed": True}


def _round(
    server: RunningServer, waves: Sequence[Sequence[SampleRequest]], concurrency: int
) -> dict[str, Any]:
    begun_s, busy_s = time.perf_counter(), busy_cpu_s()
    server_s, client_s = tree_cpu_s(server.pid) or 0.0, own_cpu_s()
    summary = asyncio.run(_send(server.url, waves, concurrency))
    wall_s = time.perf_counter() - begun_s
    server_s = (tree_cpu_s(server.pid) or server_s) - server_s
    client_s = own_cpu_s() - client_s
    busy_s = busy_cpu_s() - busy_s
    wanted = sum(ask.max_tokens for wave in waves for ask in wave)
    if summary["failures"] or summary["output_tokens"] != wanted:
        made = summary["output_tokens"]
        raise RuntimeError(f"{made} of {wanted} tokens, failures {summary['failures']}")
    return {
        "tokens_per_s": wanted / wall_s,
        "wall_s": wall_s,
        "ttft_p50_ms": summary["ttft_ms"]["p50"],
        "itl_p50_ms": summary["itl_ms"]["p50"],
        "itl_p99_ms": summary["itl_ms"]["p99"],
        "server_cores": server_s / wall_s,
        "client_cores": client_s / wall_s,
        "foreign_cores": max(0.0, busy_s - server_s - client_s) / wall_s,
    }


async def _send(
    url: str, waves: Sequence[Sequence[SampleRequest]], concurrency: int
) -> dict[str, Any]:
    # A new client each round: the server may have dropped kept-alive connections during a pause.
    client = Client(url)
    records = []
    for wave in waves:
        load = Load(concurrency=concurrency)
        records += await send_all(client, _ENDPOINT, wave, load, random.Random(0))
    client.close()
    return summarize(records)
