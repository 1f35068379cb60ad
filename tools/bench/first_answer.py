"""Time from process start to the first token: imports, weights, memory plan, warm-up and capture.

Two processes are measured: the second finds what the first has compiled in the user's caches.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from tools.bench.session import Session, load_core, parser, print_row

_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 8
_FIRST_TOKEN = "first token"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each of the two starts."""
    made = parser(__doc__, "qwen3-0.6b", "llama-3.1-8b")
    made.add_argument("--child", action="store_true", help="be one of the measured processes")
    options = made.parse_args(argv)
    if options.child:
        session = Session(load_core(options, max_model_len=4096))
        session.submit([7] * _PROMPT_TOKENS, _OUTPUT_TOKENS)
        while not session.step():
            pass
        print(_FIRST_TOKEN, flush=True)
        session.finish()
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    for start in ("first start", "second start"):
        begun_s = time.perf_counter()
        command = [sys.executable, "-m", "tools.bench.first_answer", "--child", *given]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            is_told = any(line.strip() == _FIRST_TOKEN for line in process.stdout)
            first_s = time.perf_counter() - begun_s
            process.stdout.read()  # until it has exited
        if process.returncode or not is_told:
            raise RuntimeError(f"the process ended with status {process.returncode}")
        print_row({"case": f"{options.model} {start}", "time_s": first_s})
    return 0


if __name__ == "__main__":
    sys.exit(main())
