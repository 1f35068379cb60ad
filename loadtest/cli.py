"""``quire bench``: run a load test and print a table, a report and a line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.client import Client, HttpError, StreamRecord, raw_json
from loadtest.driver import Endpoint, GaugeMonitor, Load, send_all
from loadtest.machine import describe_machine, own_cpu_s, tree_cpu_s
from loadtest.report import Run, format_table, render_html
from loadtest.scrape import differences, scrape
from loadtest.summary import summarize
from loadtest.workloads import (
    WORKLOADS,
    SampleRequest,
    Shape,
    draw_lengths,
    make_requests,
    make_text,
)

_CALIBRATION_WORDS = 1500
_EXAMPLES = """\
examples:
  quire bench                                    32 requests of 256 + 64 tokens, 8 at a time
  quire bench --concurrency 1,4,16 --ignore-eos  three runs, every output of full length
  quire bench --workload chat --rate 4 --num-requests 200 --html report.html
  quire bench --workload shared-prefix --input-len 1100 --prefix-len 1024
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load test of the command line. Returns 0 if every request was answered in full."""
    options = build_parser().parse_args(argv)
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    try:
        with runner:
            return runner.run(run(options))
    except _ReaderLeft as error:
        raise BrokenPipeError from error  # which says nothing of the server
    except (HttpError, ValueError) as error:
        print(f"quire bench: {error}", file=sys.stderr)
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        problem = f"no server answers at {options.url} ({reason[0].lower()}{reason[1:]})"
        print(f"quire bench: {problem}", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. Options shared with vLLM's serving benchmark also accept its spelling."""
    parser = argparse.ArgumentParser(
        prog="quire bench",
        description="Benchmark any OpenAI-compatible server: throughput, time to first token, time "
        "between tokens.\nThe last line of the output is JSON.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--url",
        "--base-url",
        default=os.environ.get("QUIRE_URL") or "http://127.0.0.1:8000",
        help="server address (QUIRE_URL; default: http://127.0.0.1:8000)",
    )
    add("--model", metavar="NAME", help="model to benchmark (default: the first listed)")
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("QUIRE_API_KEY", "").split(",")[0] or None,
        help="bearer token (QUIRE_API_KEY)",
    )
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="API to use (default: completions)",
    )
    add(
        "--workload",
        choices=WORKLOADS,
        default="fixed",
        help="distribution of lengths (default: fixed)",
    )
    add(
        "--input-len",
        metavar="N",
        type=_positive_integer,
        default=256,
        help="prompt tokens; chat: the mean (default: 256)",
    )
    add(
        "--output-len",
        metavar="N",
        type=_positive_integer,
        default=64,
        help="output tokens; chat: the mean (default: 64)",
    )
    add(
        "--range-ratio",
        metavar="R",
        type=_share,
        default=0.5,
        help="random: relative spread of both lengths (default: 0.5)",
    )
    add(
        "--prefix-len",
        metavar="N",
        type=_natural,
        default=0,
        help="shared-prefix: tokens in common (default: three quarters of the prompt)",
    )
    add(
        "--max-total",
        metavar="N",
        type=_positive_integer,
        help="most tokens of prompt and output, to fit the context",
    )
    add(
        "--num-requests",
        "--num-prompts",
        metavar="N",
        type=_positive_integer,
        default=32,
        help="requests per run (default: 32)",
    )
    add(
        "--concurrency",
        "--max-concurrency",
        metavar="N[,N...]",
        type=_positive_list,
        default=[8],
        help="requests in flight; several values make several runs (default: 8)",
    )
    add(
        "--rate",
        "--request-rate",
        metavar="R",
        type=_positive,
        help="requests per second with Poisson arrivals, instead of --concurrency",
    )
    add(
        "--warmup",
        metavar="N",
        type=_natural,
        default=2,
        help="requests sent first and not counted (default: 2)",
    )
    add("--ignore-eos", action="store_true", help="produce outputs of full length")
    add(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="sampling temperature (default: 0, greedy)",
    )
    add("--text", action="store_true", help="send text even if the server accepts token ids")
    add("--seed", metavar="N", type=int, default=0, help="seed of the requests (default: 0)")
    add(
        "--timeout-s",
        metavar="S",
        type=_positive,
        default=600.0,
        help="time limit per request (default: 600)",
    )
    add(
        "--server-pid",
        metavar="PID",
        type=int,
        help="report CPU time of this process and its children",
    )
    add("--html", metavar="FILE", type=Path, help="write an HTML report with charts")
    add("--json", metavar="FILE", type=Path, help="write the results as JSON")
    return parser


async def run(options: argparse.Namespace) -> int:
    """Perform all runs that ``options`` describe and print them on standard output."""
    client = Client(options.url, api_key=options.api_key, timeout_s=options.timeout_s)
    try:
        model = options.model or await _first_model(client)
        endpoint = Endpoint(options.endpoint == "chat", model, _extra(options))
        make = await _prompt_maker(client, endpoint, options)
        loads = [Load(concurrency=count) for count in options.concurrency]
        if options.rate is not None:
            loads = [Load(rate=options.rate)]
        runs = []
        for index, load in enumerate(loads):
            warmup = make(options.warmup, f"warm-up {index}")
            await send_all(client, endpoint, warmup, Load(concurrency=8), random.Random(0))
            asks = make(options.num_requests, f"run {index}")
            runs.append(await measure(client, endpoint, asks, load, options))
    finally:
        client.close()
    shape = asdict(_shape(options))
    result = {
        "model": model,
        "endpoint": endpoint.path,
        "shape": shape,
        "ignore_eos": options.ignore_eos,
        "seed": options.seed,
        "machine": describe_machine(),
        "runs": [{"load": asdict(each.load), **each.summary} for each in runs],
    }
    _print(format_table(runs))
    files: list[tuple[Path, str]] = []
    if options.html:
        files.append((options.html, render_html(result, runs)))
    if options.json:
        files.append((options.json, json.dumps(result, indent=2) + "\n"))
    problems: list[str] = []
    for path, text in files:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            problems.append(f"cannot write {path}: {error.strerror or error}")
    if options.html and not problems:
        _print(f"report: {options.html}")
    _print(json.dumps(result))
    if problems:
        raise ValueError("; ".join(problems))
    return 0 if all(each.summary["completed"] == each.summary["requests"] for each in runs) else 1


async def measure(
    client: Client,
    endpoint: Endpoint,
    requests: Sequence[SampleRequest],
    load: Load,
    options: argparse.Namespace,
) -> Run:
    """Perform one run and collect its records, its figures and the server's own metrics."""
    progress = _Progress(load, len(requests))
    before = await scrape(client)
    server_cpu_s = tree_cpu_s(options.server_pid) if options.server_pid else None
    client_cpu_s, begun_s = own_cpu_s(), time.perf_counter()
    rng = random.Random(f"{options.seed} arrivals")
    async with GaugeMonitor(client) as watch:
        records = await send_all(client, endpoint, requests, load, rng, progress)
    wall_s = time.perf_counter() - begun_s
    _check_lengths(records, requests, ignore_eos=options.ignore_eos)
    summary = summarize(records)
    summary["client_cpu_cores"] = (own_cpu_s() - client_cpu_s) / wall_s
    if server_cpu_s is not None:
        spent_s = (tree_cpu_s(options.server_pid) or server_cpu_s) - server_cpu_s
        summary["server_cpu_cores"] = spent_s / wall_s
    summary["server"] = differences(before, await scrape(client))
    progress.end()
    return Run(load, records, summary, watch.samples)


def _check_lengths(
    records: Sequence[StreamRecord], asks: Sequence[SampleRequest], *, ignore_eos: bool
) -> None:
    """Mark outputs that are longer than requested, or shorter under ``ignore_eos``, as failed."""
    for record, ask in zip(records, asks, strict=True):
        short = ignore_eos and record.output_tokens < ask.max_tokens
        if record.failure is None and (short or record.output_tokens > ask.max_tokens):
            record.failure = "wrong_length"


async def _first_model(client: Client) -> str:
    try:
        return raw_json(await client.fetch("GET", "/v1/models"))["data"][0]["id"]
    except (LookupError, TypeError):
        raise ValueError("the server lists no model; name one with --model") from None


async def _prompt_maker(client: Client, endpoint: Endpoint, options: argparse.Namespace) -> Any:
    """Return a function of (count, label) that builds that many requests, seeded by the label.

    Prompts are token ids of exact length if the server offers ``/tokenize`` and the endpoint
    accepts ids. Otherwise they are text whose length is calibrated with one request.
    """
    sample = make_text(_CALIBRATION_WORDS, random.Random(f"{options.seed} calibration"))
    pool = await _tokenize(client, endpoint.model, sample)
    if pool is not None:
        per_word = len(pool) / _CALIBRATION_WORDS
    else:
        words = " ".join(sample.split()[:100])
        record = await client.stream(endpoint.path, endpoint.body(SampleRequest(words, 1)))
        if record.failure is not None or not record.prompt_tokens:
            said = f": {record.message}" if record.message else ""
            raise ValueError(f"the calibration request failed ({record.failure}){said}")
        per_word = record.prompt_tokens / 100
    use_ids = pool is not None and not endpoint.chat and not options.text

    def make(count: int, label: str) -> list[SampleRequest]:
        rng = random.Random(f"{options.seed} {label}")
        lengths = draw_lengths(_shape(options), count, rng)
        return make_requests(
            lengths, rng, token_pool=pool if use_ids else None, tokens_per_word=per_word
        )

    return make


async def _tokenize(client: Client, model: str, text: str) -> list[int] | None:
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        tokens = raw_json(await client.fetch("POST", "/tokenize", body))["tokens"]
    except (HttpError, ValueError, LookupError, TypeError):
        return None
    return tokens or None


def _shape(options: argparse.Namespace) -> Shape:
    return Shape(
        workload=options.workload,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        prefix_len=options.prefix_len,
        max_total=options.max_total,
    )


def _extra(options: argparse.Namespace) -> dict[str, Any]:
    extra: dict[str, Any] = {"temperature": options.temperature}
    if options.ignore_eos:
        extra["ignore_eos"] = True
    return extra


def _positive_list(text: str) -> list[int]:
    return [_positive_integer(part) for part in text.split(",")]


def _positive_integer(text: str) -> int:
    if not (number := _natural(text)):
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text!r}")
    return number


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, not {text!r}")
    return int(text)


def _positive(text: str) -> float:
    if not 0 < (number := _float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _share(text: str) -> float:
    if not 0 <= (number := _float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, not {text!r}")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


class _ReaderLeft(Exception):
    """Nobody reads the output any more."""


def _print(text: str) -> None:
    """Print on standard output. Raises _ReaderLeft."""
    try:
        print(text)
    except BrokenPipeError as error:
        raise _ReaderLeft from error


class _Progress:
    """A counter of finished requests, redrawn in place on a terminal."""

    def __init__(self, load: Load, total: int) -> None:
        self._what = load.describe()
        self._total = total
        self._done = 0
        self._failed = 0
        self._shown = sys.stderr.isatty()

    def __call__(self, record: StreamRecord) -> None:
        self._done += 1
        self._failed += record.failure is not None
        if self._shown:
            failed = f", {self._failed} failed" if self._failed else ""
            text = f"\r\x1b[K{self._what}: {self._done}/{self._total}{failed}"
            print(text, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
