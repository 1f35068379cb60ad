"""The share of allocated KV memory that is unused, on conversations: ``python -m loadtest.waste``.

A paged cache wastes at most the unfilled end of each sequence's last block. The server sums, over
its steps, the token slots in held blocks and those of them that hold no token. The ratio of the two
over a run of the chat-like workload is the wasted share of KV memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.cli import build_parser, run
from loadtest.process import running_server


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a model, load it, and fail unless the waste is below the limit."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.waste",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("serve", nargs="*", help="after --: MODEL and flags of quire serve")
    parser.add_argument("--limit", type=float, default=0.04, help="share that may be wasted")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=220, help="mean prompt tokens")
    parser.add_argument("--output-len", type=int, default=200, help="mean output tokens")
    parser.add_argument("--max-total", type=int, default=1900, help="longest of both together")
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/waste.json"))
    options = parser.parse_args(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with running_server(options.serve) as server:
        load = build_parser().parse_args(
            [
                *("--url", server.url, "--workload", "chat", "--ignore-eos"),
                *("--input-len", str(options.input_len), "--output-len", str(options.output_len)),
                *("--max-total", str(options.max_total)),
                *("--num-requests", str(options.requests)),
                *("--concurrency", str(options.concurrency)),
                *("--json", str(options.out)),
            ]
        )
        status = asyncio.run(run(load))
    told = json.loads(options.out.read_text())["runs"][0]["server"]
    if "kv_waste" not in told:
        print("the server's metrics do not tell the slots held and wasted", file=sys.stderr)
        return 1
    print(f"KV slots wasted: {told['kv_waste']:.2%} (limit {options.limit:.0%})")
    return status or int(told["kv_waste"] >= options.limit)


if __name__ == "__main__":
    sys.exit(main())
