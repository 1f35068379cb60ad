"""How step time grows with the number of running sequences and with context length.

Step time is measured from outside: while the server only decodes, the gap between two events of a
stream is one engine step. Only gaps between the start of the last stream and the end of the first
one count.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtest.client import Client, StreamRecord
from loadtest.cpu.parts import PARTS
from loadtest.cpu.servers import MODEL_NAME, running_quire
from loadtest.driver import Endpoint, Load, send_all
from loadtest.models import SHAPES, ensure_model
from loadtest.svg import line_chart, standalone
from loadtest.workloads import SampleRequest

SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (64, 256, 512, 1024, 1536, 2048, 3072, 3968)
VARIANTS = ("0.5b-bf16", "0.5b-int8", "0.5b-int4", "100m-bf16")
_SHORT_PROMPT = 32
_OUTPUT = 40  # tokens; enough gaps for a median

Points = list[tuple[int, float]]  # the varied quantity, and milliseconds per step


def measure_scaling(
    models: Path,
    command: Sequence[str],
    *,
    variants: Sequence[str] = VARIANTS,
    sequences: Sequence[int] = SEQUENCES,
    contexts: Sequence[int] = CONTEXTS,
    on_variant: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure step time over ``sequences`` and ``contexts`` for each variant the server accepts.

    ``on_variant`` is called with the result so far after each variant.
    """
    result: dict[str, Any] = {"sequences": {}, "contexts": {}, "skipped": {}}
    for name in variants:
        part = PARTS[name]
        shape = SHAPES[part.model]
        model = ensure_model(shape, models / f"{part.model}-bfloat16")
        try:
            with running_quire(model, part.flags, command) as server:
                ask = [(count, count, _SHORT_PROMPT) for count in sequences]
                result["sequences"][name] = _points(server.url, ask, shape.vocab)
                ask = [(length, 1, length) for length in contexts]
                result["contexts"][name] = _points(server.url, ask, shape.vocab)
        except RuntimeError as error:
            result["skipped"][name] = str(error).strip().splitlines()[-1]
        on_variant(result)
    return result


def write_charts(result: dict[str, Any], directory: Path) -> list[Path]:
    """Write two SVG files into ``directory``."""
    written = []
    for key, label in (("sequences", "running sequences"), ("contexts", "context (tokens)")):
        chart = line_chart(f"Time of a step (ms) by {label}", label, list(result[key].items()))
        path = directory / f"scaling-{key}.svg"
        path.write_text(standalone(chart), encoding="utf-8")
        written.append(path)
    return written


def _points(url: str, asked: Sequence[tuple[int, int, int]], vocab: int) -> Points:
    """Measure each of ``asked``: (x value of the point, number of sequences, prompt length)."""
    points: Points = []
    rng = random.Random("scaling")
    for at, count, length in [asked[0], *asked]:  # the first one warms up
        asks = [
            SampleRequest([rng.randrange(vocab // 8, vocab) for _ in range(length)], _OUTPUT)
            for _ in range(count)
        ]
        points.append((at, statistics.median(_steps_ms(asyncio.run(_send(url, asks))))))
    return points[1:]


async def _send(url: str, asks: Sequence[SampleRequest]) -> list[StreamRecord]:
    client = Client(url)
    endpoint = Endpoint(False, MODEL_NAME, {"temperature": 0.0, "ignore_eos": True})
    load = Load(concurrency=len(asks))
    records = await send_all(client, endpoint, asks, load, random.Random(0))
    client.close()
    return records


def _steps_ms(records: Sequence[StreamRecord]) -> Iterator[float]:
    """The gaps during which all streams were running.

    Raises:
        RuntimeError: a request failed.
    """
    for record in records:
        if record.failure is not None:
            raise RuntimeError(f"a request failed: {record.failure}")
    begun_s = max(record.token_times_s[0] for record in records)
    ended_s = min(record.token_times_s[-1] for record in records)
    for record in records:
        for a, b in itertools.pairwise(record.token_times_s):
            if begun_s <= a and b <= ended_s:
                yield (b - a) * 1e3
