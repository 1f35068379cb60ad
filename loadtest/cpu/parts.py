"""The parts of the benchmark: the model served, the servers compared, and the loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.cpu.ceilings import measure_ceilings
from loadtest.cpu.loads import MAIN, OVERHEAD, PREFIX, CpuLoad, floor_s
from loadtest.cpu.rounds import idle_share, measure_load
from loadtest.cpu.servers import MAX_SEQUENCES, Peer, running_earlier, running_peers, running_quire
from loadtest.machine import tree_peak_bytes
from loadtest.models import SHAPES, ensure_model

QUIRE = "quire"


@dataclass(frozen=True)
class Part:
    """One model in one weight format."""

    name: str
    model: str
    weight_bits: int
    loads: tuple[CpuLoad, ...]
    flags: tuple[str, ...] = ()  # passed to quire serve
    peers: tuple[Peer, ...] = field(default=())


PARTS = {
    part.name: part
    for part in (
        Part(
            "0.5b-bf16",
            "0.5b",
            16,
            (*MAIN, *PREFIX),
            ("--dtype", "bfloat16"),
            (Peer("vllm bf16"), Peer("llama bf16")),
        ),
        Part(
            "0.5b-int8",
            "0.5b",
            8,
            (*MAIN, *PREFIX),
            ("--dtype", "bfloat16", "--quantization", "int8"),
            (Peer("vllm w8a8"), Peer("llama q8_0")),
        ),
        Part(
            "0.5b-int4",
            "0.5b",
            4,
            MAIN,
            ("--dtype", "bfloat16", "--quantization", "int4"),
            (Peer("llama q4_0"),),
        ),
        Part(
            "100m-bf16",
            "100m",
            16,
            MAIN,
            ("--dtype", "bfloat16"),
            (Peer("vllm bf16"), Peer("llama bf16")),
        ),
        Part(
            "tiny-bf16",
            "tiny",
            16,
            OVERHEAD,
            ("--dtype", "bfloat16"),
            (Peer("vllm bf16"), Peer("llama bf16")),
        ),
    )
}


def measure_part(
    part: Part,
    *,
    concurrencies: Sequence[int],
    rounds: int,
    tries: int,
    programs: Mapping[str, str],
    models: Path,
    command: Sequence[str],
    earlier: Sequence[str] = (),
    on_load: Callable[[str, dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure one part and return, by server, startup time, peak memory and Quire's idle CPU use.

    Args:
        part: the part to measure.
        concurrencies: the loads to run; all of them if empty.
        rounds: the number of rounds for each load and side.
        tries: how often a disturbed round is attempted in all.
        programs: command lines of the peers that take part, by program.
        models: the directory in which models are created.
        command: the command that runs Quire; this interpreter's if empty.
        earlier: the command of another version of Quire, which takes part if given.
        on_load: called with each load's key and result as soon as it is measured.

    Raises:
        RuntimeError: a server did not start, or did not answer every request in full.
    """
    print(part.name, file=sys.stderr, flush=True)
    shape = SHAPES[part.model]
    model = ensure_model(shape, models / f"{part.model}-bfloat16")
    chosen = [each for each in part.loads if not concurrencies or each.concurrency in concurrencies]
    before_load = measure_ceilings()
    with (
        running_quire(model, part.flags, command) as quire,
        running_earlier(model, part.flags, earlier) as older,
        running_peers(part.peers, programs, model, MAX_SEQUENCES) as peers,
    ):
        sides = {QUIRE: quire, **older, **peers}
        for load in chosen:
            results = measure_load(sides, load, vocab=shape.vocab, rounds=rounds, tries=tries)
            after_load = measure_ceilings()
            ceilings, before_load = before_load.mean(after_load), after_load
            limit_s = floor_s(shape, load, part.weight_bits, ceilings)
            measured = {
                "floor_tokens_per_s": load.output_tokens / limit_s,
                "ceilings": asdict(ceilings),
                "sides": results,
            }
            on_load(load.key, measured)
        servers = {
            name: {"ready_s": server.ready_s, "peak_bytes": tree_peak_bytes(server.pid)}
            for name, server in sides.items()
        }
        servers[QUIRE]["idle_cores"] = idle_share(quire)
    return servers
