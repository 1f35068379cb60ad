"""Runs the benchmark, or parts of it, and prints tables; the last line of output is JSON.

Results are merged into one file, so that a long run can be split: measuring a load again replaces
its older figures, and the gates are judged on everything in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.cpu.gates import evaluate_gates
from loadtest.cpu.parts import PARTS, measure_part
from loadtest.cpu.scaling import measure_scaling, write_charts
from loadtest.cpu.servers import PROGRAMS
from loadtest.cpu.tables import format_result
from loadtest.machine import describe_machine
from loadtest.startup import first_token_s

_OTHERS = ("start", "scaling")
_QUICK_PARTS = ("0.5b-bf16", "tiny-bf16", "start")
_EXAMPLES = """\
examples:
  python -m loadtest.cpu                                       everything
  python -m loadtest.cpu --quick                               a first look in a few minutes
  python -m loadtest.cpu --only 0.5b-bf16 --concurrency 16     one part, one of its loads
  python -m loadtest.cpu --llama-server "llama-server -t 2"    a peer beside us
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts. Returns 1 if one could not be measured; a missed gate is a result."""
    options = _parser().parse_args(argv)
    asked = options.only or (_QUICK_PARTS if options.quick else (*PARTS, *_OTHERS))
    result = _read(options.out)
    result.update(machine=describe_machine(), failed={})
    if options.note:
        result.setdefault("notes", []).append(options.note)
    status = 0
    for name in asked:
        try:
            _measure(name, options, result)
        except RuntimeError as error:
            status = 1
            print(f"{name}: {error}", file=sys.stderr)
            result["failed"][name] = str(error).strip().splitlines()[-1]
        _write(options.out, result)
    verdicts = evaluate_gates(result)
    result["gates"] = [verdict.as_dict() for verdict in verdicts]
    _write(options.out, result)
    print(format_result(result, verdicts))
    print(json.dumps({"parts": asked, "gates": result["gates"]}))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.cpu",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = ", ".join((*PARTS, *_OTHERS))
    add("--only", type=_names, metavar="PART,...", help=f"of {names}")
    add("--concurrency", type=_numbers, default=[], metavar="N,...", help="of the loads to send")
    add("--rounds", type=int, help="of each load and side (3; 1 under --quick)")
    add("--tries", type=int, default=3, metavar="N", help="of a round that was disturbed")
    add("--quick", action="store_true", help=f"one round of {', '.join(_QUICK_PARTS)}")
    add("--out", type=Path, default=Path("loadtest/results/bench-cpu.json"), metavar="FILE")
    add("--note", default="", metavar="TEXT", help="kept in the file, such as a peer's version")
    add("--models-dir", type=Path, default=Path("loadtest/out/models"), metavar="DIR")
    add("--command", default="", help="runs Quire's command line, where it is not this checkout's")
    add("--earlier", default="", metavar="CMD", help="the same of another version, to take turns")
    for program, variable in PROGRAMS.items():
        flag = variable.removeprefix("QUIRE_BENCH_").lower().replace("_", "-")
        given = os.environ.get(variable, "")
        add(f"--{flag}", dest=program, default=given, metavar="CMD", help=f"also by {variable}")
    return parser


def _measure(name: str, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure one part into ``result``, which is written to disk after each load.

    Raises:
        RuntimeError: the part could not be measured.
    """
    command = shlex.split(options.command)
    if name == "start":
        result["start"] = _first_tokens(command, 3 if options.quick else 5)
        return
    if name == "scaling":

        def draw(scaling: dict[str, Any]) -> None:
            result["scaling"] = scaling
            _write(options.out, result)
            write_charts(scaling, options.out.parent)

        measure_scaling(options.models_dir, command, on_variant=draw)
        return
    part = PARTS[name]
    entry = result["parts"].setdefault(name, {"flags": part.flags, "loads": {}, "servers": {}})

    def keep(key: str, load: dict[str, Any]) -> None:
        entry["loads"][key] = load
        _write(options.out, result)

    servers = measure_part(
        part,
        concurrencies=options.concurrency,
        rounds=options.rounds or (1 if options.quick else 3),
        tries=options.tries,
        programs={program: getattr(options, program) for program in PROGRAMS},
        models=options.models_dir,
        command=command,
        earlier=shlex.split(options.earlier),
        on_load=keep,
    )
    entry["servers"].update(servers)


def _first_tokens(command: Sequence[str], runs: int) -> dict[str, Any]:
    """Time from exec to the first streamed token of the embedded model."""
    start = [*(command or (sys.executable, "-m", "server")), "serve"]
    taken = [first_token_s(start) for _ in range(runs)]
    return {"first_token_s": taken, "median_s": statistics.median(taken)}


def _read(path: Path) -> dict[str, Any]:
    """Earlier results from this kind of machine; results from another kind are discarded."""
    if path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["machine"]["cpu"] == describe_machine()["cpu"]:
            return result
    return {"parts": {}}


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in (*PARTS, *_OTHERS):
            raise argparse.ArgumentTypeError(f"no part is called '{name}'")
    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
