"""Time from starting the process to the first streamed token: ``python -m loadtest.startup``.

The clock starts right before the server process is spawned. It stops at the first event with text
of a streamed chat request, sent as soon as the port accepts connections. Each start is a new
process; the system's file cache is left as it is.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from loadtest.machine import describe_machine
from loadtest.process import free_port

_MESSAGE = "What is the capital of France?"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a number of starts and print a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--command",
        default=f"{shlex.quote(sys.executable)} -m server serve",
        help="starts the server; --port is added",
    )
    parser.add_argument("--limit-s", type=float, default=60.0, help="gives up a run after")
    options = parser.parse_args(argv)
    taken = []
    for run in range(options.runs):
        taken.append(first_token_s(shlex.split(options.command), limit_s=options.limit_s))
        print(f"run {run + 1}: {taken[-1]:.2f} s to the first streamed token")
    result = {
        "first_token_s": [round(value, 3) for value in taken],
        "median_s": round(statistics.median(taken), 3),
        "max_s": round(max(taken), 3),
        "machine": describe_machine(),
    }
    print(json.dumps(result))
    return 0


def first_token_s(command: Sequence[str], *, limit_s: float = 60.0) -> float:
    """Seconds from exec to the first streamed token of one start.

    Raises:
        RuntimeError: the server exited, or sent no token within ``limit_s``.
    """
    port = free_port()
    begun_s = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while time.perf_counter() - begun_s < limit_s:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            try:
                _wait_for_token(port, limit_s)
            except OSError:
                time.sleep(0.01)  # not listening yet
                continue
            return time.perf_counter() - begun_s
        raise RuntimeError(f"no token within {limit_s:g} s")
    finally:
        process.terminate()
        process.wait()


def _wait_for_token(port: int, timeout_s: float) -> None:
    """Request a streamed answer and return at its first text.

    Raises:
        OSError: the server is not listening yet.
        RuntimeError: the answer contained no token.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    body = {"messages": [{"role": "user", "content": _MESSAGE}], "stream": True, "max_tokens": 8}
    try:
        connection.request("GET", "/v1/models")
        model = json.loads(connection.getresponse().read())["data"][0]["id"]
        payload = json.dumps({**body, "model": model})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", payload, headers)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if choices[0].get("delta", {}).get("content"):
                    return
    finally:
        connection.close()
    raise RuntimeError("the stream held no text")


if __name__ == "__main__":
    sys.exit(main())
