"""``quire plan``: calibrate a machine, or answer how many replicas some traffic needs."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from engine.config import CacheConfig, EngineConfig, LoadFormat, SchedulerConfig
from engine.errors import ModelLoadError
from engine.paths import default_model_dir
from loadtest.workloads import WORKLOADS, Shape
from tools.plan.answer import Prediction, Slo, greatest_rate, predict, replicas_for
from tools.plan.simulate import Replica
from tools.plan.traffic import Arrival, at_rate, draw, rate_of, read_trace

if TYPE_CHECKING:
    from engine.models.spec import DecoderSpec
    from tools.plan.calibrate import Calibration

_DESCRIPTION = """\
Tell what some traffic will see, the most that one replica takes, and how many are needed: the
engine's own scheduler over steps whose times were measured here (--calibrate), or follow from a
device's ceilings (--bandwidth-gb-s and so on). The last line of the output is JSON.
"""
_EXAMPLES = """\
examples:
  quire plan ./model --calibrate -o here.json            measure this machine, about a minute
  quire plan here.json --workload chat --rate 20 --ttft-p99-ms 500 --tpot-p99-ms 50
  quire plan here.json --trace monday.jsonl --ttft-p99-ms 1000
  quire plan ./Llama-3.1-8B --bandwidth-gb-s 3350 --tflops 990 --memory-gib 80 --rate 40 \\
      --workload chat --input-len 1000 --output-len 300 --ttft-p99-ms 500 --tpot-p99-ms 40
"""
# What numbers may be: more than 0, at least as much, or a share.
_POSITIVE = ("seconds", "bandwidth_gb_s", "tflops", "memory_gib", "efficiency", "rate")
_POSITIVE += ("ttft_p99_ms", "tpot_p99_ms")
_AT_LEAST = {
    **dict.fromkeys(("num_threads", "num_requests", "input_len", "output_len"), 1),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), 1),
    **dict.fromkeys(("overhead_ms", "front_ms", "prefix_len", "range_ratio"), 0),
}
_SHARES = ("efficiency", "range_ratio")
_GIB = 2**30
_USABLE = 0.9  # of a device's memory, as --gpu-memory-utilization has it
_GPU_BLOCK = 64
_MAX_BLOCKS = 2**22  # more than any traffic holds; the books of more take memory here
_ITEMSIZE = 2  # bytes of a weight, and of a number in the KV cache


class PlanError(ValueError):
    """What was asked for cannot be planned; one line."""


def main(argv: Sequence[str]) -> int:
    """Calibrate or plan. Returns the exit status: 0 done, 1 failed or not possible."""
    options = build_parser().parse_args(argv)
    try:
        _check(options)
        return _calibrate(options) if options.calibrate else _plan(options)
    except OSError as error:
        told = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (ModelLoadError, ValueError) as error:
        told = " ".join(str(error).split())
    print(f"quire plan: {told}", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    """The options; lengths are named as in ``quire bench``."""
    parser = argparse.ArgumentParser(
        prog="quire plan",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        nargs="?",
        help="a calibration's file; or a model's directory, to calibrate or with ceilings",
    )
    measured = parser.add_argument_group("calibration").add_argument
    measured("--calibrate", action="store_true", help="measure SOURCE, a model, on this machine")
    measured("-o", "--output", type=Path, default=Path("calibration.json"), metavar="FILE")
    measured("--seconds", type=float, default=60.0, help="of measuring, about")
    measured("--num-threads", type=int, metavar="N", help="as the server will have")
    measured("--load-format", choices=("auto", "dummy"), default="auto")
    ceilings = parser.add_argument_group("a device by its ceilings, in bfloat16").add_argument
    ceilings("--bandwidth-gb-s", type=float, metavar="B", help="of its memory, 10^9 bytes a second")
    ceilings("--tflops", type=float, metavar="F", help="of its products, 10^12 operations a second")
    ceilings("--memory-gib", type=float, metavar="M", help="that it has")
    ceilings("--efficiency", type=float, default=0.6, help="share of its ceilings that is reached")
    ceilings("--overhead-ms", type=float, default=0.5, help="of a step, besides")
    traffic = parser.add_argument_group("traffic").add_argument
    traffic("--rate", type=float, metavar="R", help="requests a second, of a Poisson process")
    traffic("--workload", choices=WORKLOADS, default="fixed", help="how lengths are drawn")
    traffic("--input-len", type=int, default=256, metavar="N")
    traffic("--output-len", type=int, default=64, metavar="N")
    traffic("--range-ratio", type=float, default=0.5, metavar="R")
    traffic("--prefix-len", type=int, default=0, metavar="N")
    traffic("--num-requests", type=int, default=400, metavar="N", help="that are tried")
    traffic("--seed", type=int, default=0)
    traffic("--trace", type=Path, metavar="FILE", help="requests as they came, as JSON Lines")
    limits = parser.add_argument_group("limits, and the replica").add_argument
    limits("--ttft-p99-ms", type=float, metavar="MS", help="to the first token, of 99 of 100")
    limits("--tpot-p99-ms", type=float, metavar="MS", help="a token after it, of 99 of 100")
    limits("--front-ms", type=float, default=5.0, help="that HTTP and text add to a first token")
    limits("--max-num-seqs", type=int, metavar="N", help="as the server's setting")
    limits("--max-num-batched-tokens", type=int, metavar="N", help="as the server's setting")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise PlanError where a number makes no sense."""
    for name, value in vars(options).items():
        problem = ""
        if value is None:
            continue
        if name in _POSITIVE and not 0 < value < math.inf:
            problem = "must be more than 0"
        if name in _AT_LEAST and not _AT_LEAST[name] <= value < math.inf:
            problem = f"must be at least {_AT_LEAST[name]}"
        if name in _SHARES and value > 1:
            problem = "must be at most 1"
        if problem:
            raise PlanError(f"--{name.replace('_', '-')}: {problem}, not {value:.6g}")


def _calibrate(options: argparse.Namespace) -> int:
    from tools.plan.calibrate import calibrate

    if options.output.is_dir() or not os.access(options.output.absolute().parent, os.W_OK):
        raise PlanError(f"--output: {options.output} cannot be written")
    config = EngineConfig(
        model=options.source or str(default_model_dir()),
        load_format=cast("LoadFormat", options.load_format),
        num_threads=options.num_threads,
        scheduler=_scheduler(options, SchedulerConfig(overlap=False)),
        cache=CacheConfig(),
    )
    found = calibrate(config, options.seconds, _show)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    # Steps were measured one by one; in service they overlap where that is the default.
    scheduler = msgspec.structs.replace(found.replica.scheduler, overlap=None)
    replica = msgspec.structs.replace(found.replica, scheduler=scheduler)
    found = msgspec.structs.replace(found, replica=replica)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    print(_told_of(found))
    print(f"\nquire plan {options.output} --rate 10 --ttft-p99-ms 500")
    return 0


def _plan(options: argparse.Namespace) -> int:
    replica = _replica(options)
    arrivals = _arrivals(options, replica)
    slo = Slo(options.ttft_p99_ms, options.tpot_p99_ms)
    is_stretched = slo != Slo() or (options.trace is not None and options.rate is not None)
    if is_stretched and arrivals[0].at_s == arrivals[-1].at_s:
        raise PlanError("requests that all come at once have no rate; there must be two moments")
    rate = options.rate or (rate_of(arrivals) if options.trace else None)
    result: dict[str, object] = {"replica": replica.name, "slo": slo}
    if rate is not None:
        alone = predict(replica, at_rate(arrivals, rate), options.front_ms)
        result["one_replica"] = alone
        print(f"One replica at {_a_second(rate)}:\n{_table(alone)}")
    if slo == Slo():
        print(_json(result))
        return 0
    most = greatest_rate(replica, arrivals, slo, options.front_ms)
    result["most"] = most
    if most is None:
        print("No rate keeps the limits: a request that is alone takes longer.")
        print(_json(result))
        return 1
    print(f"The most that one replica takes: {_a_second(most.rate)}\n{_table(most)}")
    if rate is not None:
        count, each = replicas_for(replica, arrivals, slo, rate, most, options.front_ms)
        result |= {"replicas": count, "each": each}
        print(f"Replicas needed for {_a_second(rate)}: {count}\n{_table(each)}")
    print(_json(result))
    return 0


def _replica(options: argparse.Namespace) -> Replica:
    ceilings = (options.bandwidth_gb_s, options.tflops, options.memory_gib)
    if options.source is None:
        raise PlanError("name a calibration's file, or a model with --calibrate or ceilings")
    if all(value is None for value in ceilings):
        if Path(options.source).is_dir():
            raise PlanError(f"{options.source}: a model's directory wants --calibrate or ceilings")
        from tools.plan.calibrate import read_calibration

        replica = read_calibration(Path(options.source)).replica
    else:
        if None in ceilings:
            raise PlanError("give --bandwidth-gb-s, --tflops and --memory-gib, all positive")
        replica = _by_ceilings(options)
    scheduler = _scheduler(options, replica.scheduler)
    return msgspec.structs.replace(replica, scheduler=scheduler)


def _by_ceilings(options: argparse.Namespace) -> Replica:
    """A replica on one device of these ceilings. Brings torch, to count the parameters."""
    from engine.models.checkpoint import read_config
    from engine.models.loader import num_parameters
    from engine.models.spec import DecoderSpec
    from tools.plan.cost import Roofline

    spec = read_config(options.source).spec
    if not isinstance(spec, DecoderSpec):
        raise PlanError(f"{options.source}: the model does not generate text")
    parameters = num_parameters(spec)
    kv_bytes = spec.kv_bytes_per_token(_ITEMSIZE)
    room = options.memory_gib * _GIB * _USABLE - parameters * _ITEMSIZE
    num_states, num_snapshots, state_bytes = _states(spec, options, room)
    room -= (num_states + num_snapshots) * state_bytes
    num_blocks = min(int(room // (kv_bytes * _GPU_BLOCK)), _MAX_BLOCKS)
    if num_blocks < 1:
        needs = parameters * _ITEMSIZE / _GIB
        raise PlanError(f"--memory-gib: the weights alone take {needs:.1f} GiB")
    return Replica(
        name=Path(options.source).name,
        device="cuda",
        num_blocks=num_blocks,
        block_size=_GPU_BLOCK,
        max_model_len=min(spec.default_context, num_blocks * _GPU_BLOCK),
        num_states=num_states,
        num_snapshots=num_snapshots,
        cost=Roofline(
            weights_bytes=parameters * _ITEMSIZE,
            kv_bytes_per_token=kv_bytes,
            num_parameters=parameters,
            bytes_per_s=options.bandwidth_gb_s * 1e9,
            flops_per_s=options.tflops * 1e12,
            attention_flops=4.0 * _attended_size(spec),
            state_bytes=state_bytes,
            efficiency=options.efficiency,
            overhead_s=options.overhead_ms / 1e3,
        ),
    )


def _attended_size(spec: DecoderSpec) -> int:
    """The width of all layers' queries that attend."""
    return sum(spec.of_layer(layer).query_size for layer in spec.layers if not layer.recurrent)


def _states(spec: DecoderSpec, options: argparse.Namespace, room: float) -> tuple[int, int, int]:
    """How many sequences and snapshots have room for a state, and what one takes; none where the
    model has none. As an engine plans them (``engine/kv_cache/storage.py``)."""
    from engine.kv_cache.storage import MAX_SNAPSHOTS, SNAPSHOT_SHARE, STATE_SHARE

    each = spec.state_bytes(_ITEMSIZE)
    if not each:
        return 0, 0, 0
    most = options.max_num_seqs or SchedulerConfig().max_num_seqs
    num_states = max(1, min(most, int(room * STATE_SHARE["cuda"]) // each))
    return num_states, min(MAX_SNAPSHOTS, int(room * SNAPSHOT_SHARE) // each), each


def _scheduler(options: argparse.Namespace, given: SchedulerConfig) -> SchedulerConfig:
    changes = {
        name: value
        for name in ("max_num_seqs", "max_num_batched_tokens")
        if (value := getattr(options, name)) is not None
    }
    return msgspec.structs.replace(given, **changes)


def _arrivals(options: argparse.Namespace, replica: Replica) -> list[Arrival]:
    if options.trace is not None:
        return read_trace(options.trace)
    shape = Shape(
        workload=options.workload,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        prefix_len=options.prefix_len,
        max_total=replica.max_model_len,
    )
    return draw(shape, options.rate or 1.0, options.num_requests, options.seed)


def _show(fraction: float, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{fraction:4.0%}  {what:<50}", end="", file=sys.stderr, flush=True)


def _told_of(found: Calibration) -> str:
    fit = found.fit
    return (
        f"{found.replica.name}: {fit.num_steps:,} steps measured; the fitted costs are off by "
        f"{fit.median_error:.0%} (median) and {fit.p90_error:.0%} (nine of ten)"
    )


def _table(told: Prediction) -> str:
    lines = [f"{'':14}{'p50':>10}{'p95':>10}{'p99':>10}"]
    for title, values in (
        ("TTFT, ms", told.ttft_ms),
        ("TPOT, ms", told.tpot_ms),
        ("E2E, ms", told.e2e_ms),
    ):
        if values is not None:
            figures = "".join(f"{values[name]:10,.1f}" for name in ("p50", "p95", "p99"))
            lines.append(f"{title:14}{figures}")
    notes = f"{told.output_tokens_per_s:,.0f} output tokens/s, {told.preemptions} preemptions"
    if told.refused:
        notes += f", {told.refused} of {told.refused + told.requests} could never fit"
    return "\n".join([*lines, notes, ""])


def _a_second(rate: float) -> str:
    """A rate for people: in three digits, a large one whole."""
    return f"{rate:,.0f} requests a second" if rate >= 100 else f"{rate:.3g} requests a second"


def _json(result: dict[str, object]) -> str:
    return json.dumps(_rounded(msgspec.to_builtins(result)))


def _rounded(value: Any) -> Any:
    """The same with six digits of each number, more than a plan knows."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value
