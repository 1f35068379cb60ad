"""The options of ``quire plan``, and the allowed ranges of their numbers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from loadtest.workloads import WORKLOADS
from tools.plan.errors import PlanError

_DESCRIPTION = """\
Predict the latencies of some traffic, the highest rate that one replica can serve, and how many
replicas are needed. Runs the engine's own scheduler with step times that were measured on this
machine (--calibrate) or follow from a device's peak performance (--bandwidth-gb-s and so on). The
last line of the output is JSON.
"""
_EXAMPLES = """\
examples:
  quire plan ./model --calibrate -o here.json            measure this machine, about a minute
  quire plan here.json --workload chat --rate 20 --ttft-p99-ms 500 --tpot-p99-ms 50
  quire plan here.json --trace monday.jsonl --ttft-p99-ms 1000
  quire plan ./Llama-3.1-8B --bandwidth-gb-s 3350 --tflops 990 --memory-gib 80 --rate 40 \\
      --workload chat --input-len 1000 --output-len 300 --ttft-p99-ms 500 --tpot-p99-ms 40
  quire plan ./Llama-3.3-70B --bandwidth-gb-s 3350 --tflops 990 --memory-gib 80 --max-ranks 8 \\
      --rate 10 --workload chat --input-len 1000 --output-len 300 --tpot-p99-ms 60
  quire plan --measure-link 4                            measure the links between devices
"""
# Allowed ranges: greater than 0, at least a minimum, or a share.
_POSITIVE = ("seconds", "bandwidth_gb_s", "tflops", "memory_gib", "efficiency", "rate")
_POSITIVE += ("ttft_p99_ms", "tpot_p99_ms", "link_gb_s")
_AT_LEAST = {
    **dict.fromkeys(("num_threads", "num_requests", "input_len", "output_len"), 1),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), 1),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "max_ranks"), 1),
    **dict.fromkeys(("measure_link",), 2),
    **dict.fromkeys(("overhead_ms", "front_ms", "prefix_len", "range_ratio"), 0),
    **dict.fromkeys(("link_latency_us", "layer_launch_us"), 0),
}
_SHARES = ("efficiency", "range_ratio")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; lengths are named as in ``quire bench``."""
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
        help="a calibration file; or a model directory, with --calibrate or a device's peaks",
    )
    measured = parser.add_argument_group("calibration").add_argument
    measured("--calibrate", action="store_true", help="measure the model SOURCE on this machine")
    measured(
        "-o",
        "--output",
        type=Path,
        default=Path("calibration.json"),
        metavar="FILE",
        help="calibration file to write (default: calibration.json)",
    )
    measured(
        "--seconds",
        type=float,
        default=60.0,
        help="approximate duration of the measurement (default: 60)",
    )
    measured("--num-threads", type=int, metavar="N", help="CPU threads, as the server will have")
    measured(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights (default: auto)",
    )
    ceilings = parser.add_argument_group(
        "a device given by its peak performance in bfloat16"
    ).add_argument
    ceilings(
        "--bandwidth-gb-s", type=float, metavar="B", help="memory bandwidth, 10^9 bytes per second"
    )
    ceilings(
        "--tflops", type=float, metavar="F", help="matrix products, 10^12 operations per second"
    )
    ceilings("--memory-gib", type=float, metavar="M", help="memory size")
    ceilings(
        "--efficiency",
        type=float,
        default=0.6,
        help="share of the peaks that is reached (default: 0.6)",
    )
    ceilings(
        "--overhead-ms",
        type=float,
        default=0.5,
        help="fixed time added to each step (default: 0.5)",
    )
    ranks = parser.add_argument_group("several devices for one model").add_argument
    ranks("--tensor-parallel-size", type=int, metavar="N", help="as the server's setting")
    ranks("--pipeline-parallel-size", type=int, metavar="N", help="as the server's setting")
    ranks("--enable-expert-parallel", action="store_true", help="as the server's setting")
    ranks("--max-ranks", type=int, metavar="N", help="try powers of two up to N devices")
    ranks(
        "--link-gb-s",
        type=float,
        default=300.0,
        metavar="B",
        help="all-reduce bandwidth between devices (default: 300)",
    )
    ranks(
        "--link-latency-us",
        type=float,
        default=20.0,
        metavar="T",
        help="latency of a call between devices (default: 20)",
    )
    ranks(
        "--layer-launch-us",
        type=float,
        default=200.0,
        metavar="T",
        help="host time to launch a layer; with stages, steps are not CUDA graphs (default: 200)",
    )
    ranks(
        "--measure-link",
        type=int,
        metavar="N",
        help="measure all-reduces between N ranks on this machine",
    )
    ranks(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda",
        help="device of these ranks (default: cuda)",
    )
    traffic = parser.add_argument_group("traffic").add_argument
    traffic("--rate", type=float, metavar="R", help="requests per second, with Poisson arrivals")
    traffic(
        "--workload",
        choices=WORKLOADS,
        default="fixed",
        help="distribution of lengths (default: fixed)",
    )
    traffic(
        "--input-len",
        type=int,
        default=256,
        metavar="N",
        help="prompt tokens; chat: the mean (default: 256)",
    )
    traffic(
        "--output-len",
        type=int,
        default=64,
        metavar="N",
        help="output tokens; chat: the mean (default: 64)",
    )
    traffic(
        "--range-ratio",
        type=float,
        default=0.5,
        metavar="R",
        help="random: relative spread of both lengths (default: 0.5)",
    )
    traffic(
        "--prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="shared-prefix: tokens in common (default: three quarters of the prompt)",
    )
    traffic(
        "--num-requests",
        type=int,
        default=400,
        metavar="N",
        help="requests to simulate (default: 400)",
    )
    traffic("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    traffic("--trace", type=Path, metavar="FILE", help="recorded requests, as JSON lines")
    limits = parser.add_argument_group("limits and replica settings").add_argument
    limits("--ttft-p99-ms", type=float, metavar="MS", help="limit for the time to first token")
    limits(
        "--tpot-p99-ms",
        type=float,
        metavar="MS",
        help="limit for the time per output token after it",
    )
    limits(
        "--front-ms",
        type=float,
        default=5.0,
        help="time that HTTP and text processing add to a first token (default: 5)",
    )
    limits("--max-num-seqs", type=int, metavar="N", help="as the server's setting")
    limits("--max-num-batched-tokens", type=int, metavar="N", help="as the server's setting")
    return parser


def check(options: argparse.Namespace) -> None:
    """Raise PlanError if a number is out of range."""
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
