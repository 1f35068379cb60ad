"""``quire plan``: calibrate a machine, or answer how many replicas a given traffic needs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from engine.config import CacheConfig, EngineConfig, LoadFormat, SchedulerConfig
from engine.errors import ModelLoadError
from engine.paths import default_model_dir
from loadtest.workloads import Shape
from tools.plan.cost import Link, ParallelCost
from tools.plan.errors import PlanError
from tools.plan.options import build_parser, check
from tools.plan.predict import Slo, find_max_rate, predict, replicas_for
from tools.plan.report import (
    format_calibration,
    format_layout,
    format_layouts,
    format_link,
    format_max_rate,
    format_prediction,
    format_rate,
)
from tools.plan.simulate import Replica
from tools.plan.traffic import Arrival, at_rate, draw, rate_of, read_trace

if TYPE_CHECKING:
    from engine.models.spec import DecoderSpec
    from tools.plan.ranks import Device

_GIB = 2**30
_WAYS = "--calibrate, or the device's --bandwidth-gb-s, --tflops and --memory-gib"


def main(argv: Sequence[str]) -> int:
    """Calibrate or plan. Returns the exit status: 0 on success, 1 if it failed or is impossible."""
    options = build_parser().parse_args(argv)
    try:
        check(options)
        if options.measure_link is not None:
            return _measure_link(options)
        return _calibrate(options) if options.calibrate else _plan(options)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (ModelLoadError, ValueError) as error:
        message = " ".join(str(error).split())
    print(f"quire plan: {message}", file=sys.stderr)
    return 1


def _calibrate(options: argparse.Namespace) -> int:
    from tools.plan.calibrate import calibrate

    if options.output.is_dir() or not os.access(options.output.absolute().parent, os.W_OK):
        raise PlanError(f"--output: {options.output} cannot be written")
    if options.pipeline_parallel_size is not None:  # the first stage alone would be timed
        raise PlanError("--pipeline-parallel-size: stages are planned by ceilings, not measured")
    config = EngineConfig(
        model=options.source or str(default_model_dir()),
        load_format=cast("LoadFormat", options.load_format),
        num_threads=options.num_threads,
        scheduler=_scheduler(options, SchedulerConfig(overlap=False)),
        cache=CacheConfig(),
        tensor_parallel_size=options.tensor_parallel_size or 1,
        enable_expert_parallel=options.enable_expert_parallel,
    )
    found = calibrate(config, options.seconds, _show)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    # Steps were measured one by one; in service they overlap if that is the default.
    scheduler = msgspec.structs.replace(found.replica.scheduler, overlap=None)
    replica = msgspec.structs.replace(found.replica, scheduler=scheduler)
    found = msgspec.structs.replace(found, replica=replica)
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    print(format_calibration(found))
    print(f"\nquire plan {options.output} --rate 10 --ttft-p99-ms 500")
    return 0


def _measure_link(options: argparse.Namespace) -> int:
    from tools.plan.link import measure_link

    if options.source is not None:
        raise PlanError("--measure-link: a link has no model; leave SOURCE out")
    found = measure_link(options.measure_link, options.device)
    print(format_link(found))
    print(_json(msgspec.to_builtins(found, str_keys=True)))
    return 0


def _plan(options: argparse.Namespace) -> int:
    slo = Slo(options.ttft_p99_ms, options.tpot_p99_ms)
    if options.max_ranks is not None:
        return _search(options, slo)
    replica = _replica(options)
    rate, arrivals = _traffic(options, replica.max_model_len, slo)
    result = _base_result(replica, slo)
    _print_assumptions(options, replica)
    if rate is not None:
        alone = predict(replica, at_rate(arrivals, rate), options.front_ms)
        result["one_replica"] = alone
        print(f"One replica at {format_rate(rate)}:\n{format_prediction(alone)}")
    if slo == Slo():
        print(_json(result))
        return 0
    most = find_max_rate(replica, arrivals, slo, options.front_ms)
    result["most"] = most
    if most is None:
        print("No rate keeps the limits: a request that is alone takes longer.")
        print(_json(result))
        return 1
    if most.is_short:
        result["is_short"] = True
    print(f"The most that one replica takes: {format_max_rate(most)}\n{format_prediction(most)}")
    if rate is not None:
        count, each = replicas_for(replica, arrivals, slo, rate, most, options.front_ms)
        result |= {"replicas": count, "devices": count * replica.num_ranks, "each": each}
        print(f"Replicas needed for {format_rate(rate)}: {_replicas(count, replica)}")
        print(format_prediction(each))
    print(_json(result))
    return 0


def _search(options: argparse.Namespace, slo: Slo) -> int:
    """Search for the parallel layout that needs the fewest devices."""
    from tools.plan.search import best_of, evaluate_layout, layouts

    fixed = "tensor_parallel_size", "pipeline_parallel_size"
    if any(getattr(options, name) is not None for name in fixed):
        raise PlanError("--max-ranks: it tries sizes; leave those out that are fixed")
    if slo == Slo():
        raise PlanError("--max-ranks: there must be a limit to choose by, such as --tpot-p99-ms")
    config, spec, device = _read_device_options(options)
    rate, arrivals = _traffic(options, spec.default_context_len, slo)
    tried = [
        evaluate_layout(shape, spec, device, arrivals, slo, rate, options.front_ms)
        for shape in layouts(config, options.max_ranks)
    ]
    print(format_layouts(tried))
    best = best_of(tried)
    if best is None or best.replica is None:
        print("\nNone of these keeps the limits.")
        print(_json({"slo": slo, "tried": [each.as_json() for each in tried]}))
        return 1
    replica, most = best.replica, best.at_max_rate
    _print_assumptions(options, replica)
    result = _base_result(replica, slo) | {
        "most": most,
        "tried": [each.as_json() for each in tried],
    }
    assert most is not None
    if most.is_short:
        result["is_short"] = True
    print(f"\nBest: {format_layout(replica)}, which take {format_max_rate(most)}")
    print(format_prediction(most))
    if rate is not None and best.replicas is not None and best.each is not None:
        count = best.replicas
        result |= {"replicas": count, "devices": count * replica.num_ranks, "each": best.each}
        needed = _replicas(count, replica)
        print(f"Replicas needed for {format_rate(rate)}: {needed}\n{format_prediction(best.each)}")
    print(_json(result))
    return 0


def _base_result(replica: Replica, slo: Slo) -> dict[str, object]:
    """The common first fields of the JSON line."""
    return {
        "replica": replica.name,
        "tensor_parallel_size": replica.tensor_parallel_size,
        "pipeline_parallel_size": replica.pipeline_parallel_size,
        "slo": slo,
    }


def _replicas(count: int, replica: Replica) -> str:
    """The number of replicas, with their devices if each has several."""
    size = replica.num_ranks
    return (
        f"{count}" if size == 1 else f"{count} of {format_layout(replica)}, {count * size} devices"
    )


def _print_assumptions(options: argparse.Namespace, replica: Replica) -> None:
    """Print the assumptions of a plan with several ranks."""
    if isinstance(replica.cost, ParallelCost):
        assumed = f"{options.link_gb_s:g} GB/s, {options.link_latency_us:g} us a call"
        flags = "--link-gb-s, --link-latency-us"
        if len(replica.cost.stages) > 1:
            assumed += f", {options.layer_launch_us:g} us to launch a layer"
            flags += ", --layer-launch-us"
        print(f"Taken for granted between ranks: {assumed}\n({flags})\n")


def _replica(options: argparse.Namespace) -> Replica:
    if _has_ceilings(options):
        from tools.plan.ranks import replica_of

        return replica_of(*_read_device_options(options))
    asked = ("tensor_parallel_size", "pipeline_parallel_size")
    for name in asked:
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise PlanError(f"--{flag}: a calibration is of the ranks that it was measured with")
    from tools.plan.calibrate import read_calibration

    replica = read_calibration(Path(options.source)).replica
    scheduler = _scheduler(options, replica.scheduler)
    return msgspec.structs.replace(replica, scheduler=scheduler)


def _has_ceilings(options: argparse.Namespace) -> bool:
    """Whether the device is given by ceilings. Raises PlanError if none or only some are set."""
    ceilings = (options.bandwidth_gb_s, options.tflops, options.memory_gib)
    if options.source is None:
        raise PlanError(f"name a calibration's file, or a model with {_WAYS}")
    if all(value is None for value in ceilings):
        if Path(options.source).is_dir():
            raise PlanError(f"{options.source}: a model's directory needs {_WAYS}")
        return False
    if None in ceilings:
        raise PlanError("give --bandwidth-gb-s, --tflops and --memory-gib, all positive")
    return True


def _read_device_options(options: argparse.Namespace) -> tuple[EngineConfig, DecoderSpec, Device]:
    """The engine config for devices known by their ceilings. Imports torch to read the model."""
    from tools.plan.ranks import Device, read_spec

    if not _has_ceilings(options):
        raise PlanError("--max-ranks: measured steps are of the ranks they were measured with")
    config = EngineConfig(
        model=options.source,
        scheduler=_scheduler(options, SchedulerConfig()),
        tensor_parallel_size=options.tensor_parallel_size or 1,
        pipeline_parallel_size=options.pipeline_parallel_size or 1,
        enable_expert_parallel=options.enable_expert_parallel,
    )
    device = Device(
        bytes_per_s=options.bandwidth_gb_s * 1e9,
        flops_per_s=options.tflops * 1e12,
        memory_bytes=options.memory_gib * _GIB,
        efficiency=options.efficiency,
        overhead_s=options.overhead_ms / 1e3,
        layer_launch_s=options.layer_launch_us / 1e6,
        link=Link(bytes_per_s=options.link_gb_s * 1e9, latency_s=options.link_latency_us / 1e6),
    )
    return config, read_spec(options.source), device


def _scheduler(options: argparse.Namespace, given: SchedulerConfig) -> SchedulerConfig:
    changes = {
        name: value
        for name in ("max_num_seqs", "max_num_batched_tokens")
        if (value := getattr(options, name)) is not None
    }
    return msgspec.structs.replace(given, **changes)


def _traffic(
    options: argparse.Namespace, max_total: int, slo: Slo
) -> tuple[float | None, list[Arrival]]:
    """The rate in requests per second, if given, and the requests."""
    if options.trace is not None:
        arrivals = read_trace(options.trace)
    else:
        shape = Shape(
            workload=options.workload,
            input_len=options.input_len,
            output_len=options.output_len,
            range_ratio=options.range_ratio,
            prefix_len=options.prefix_len,
            max_total=max_total,
        )
        arrivals = draw(shape, options.rate or 1.0, options.num_requests, options.seed)
    is_stretched = slo != Slo() or (options.trace is not None and options.rate is not None)
    if is_stretched and arrivals[0].at_s == arrivals[-1].at_s:
        raise PlanError("requests that all come at once have no rate; there must be two moments")
    return options.rate or (rate_of(arrivals) if options.trace else None), arrivals


def _show(fraction: float, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{fraction:4.0%}  {what:<50}", end="", file=sys.stderr, flush=True)


def _json(result: dict[str, object]) -> str:
    return json.dumps(_rounded(msgspec.to_builtins(result)))


def _rounded(value: Any) -> Any:
    """``value`` with each number rounded to six digits, more than a plan's accuracy."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value
