"""Runs each kind of step once, so that later measurements find their kernels compiled.

Triton keeps compiled kernels in the user's cache, where other processes find them. Two layers have
all kernels of a model, and a small KV cache is enough, so several of these can share a GPU.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from tools.bench.session import MAX_STEP_TOKENS, TINY, Session, load_core, parser, print_row

_NUM_LAYERS = 2
_CACHE_BYTES = 2**30
_LONG, _TINY_LONG = 2048, 96  # prompts long enough to use several programs per row


def main(argv: Sequence[str] | None = None) -> int:
    """Print the engine's log and a line of JSON: how long it took, and with which kernels."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    asked = parser(__doc__, "qwen3-0.6b", "llama-3.1-8b")
    asked.add_argument("--batch-invariant", action="store_true")
    asked.add_argument("--quantization", choices=("int8", "fp8", "int4", "nf4"))
    options = asked.parse_args(argv)
    is_tiny = options.model == TINY
    begun_s = time.perf_counter()
    core = load_core(
        options,
        max_model_len=MAX_STEP_TOKENS + 64,
        cache_bytes=_CACHE_BYTES,
        num_layers=_NUM_LAYERS,
        batch_invariant=options.batch_invariant,
        quantization=options.quantization,
    )
    session = Session(core)
    longest, long = (_TINY_LONG,) * 2 if is_tiny else (MAX_STEP_TOKENS, _LONG)
    session.submit([7] * longest, 1)
    session.finish()
    for _ in range(2):  # once eagerly, once captured
        for length in (long, 5, 3):
            session.submit([7] * length, 4)
        session.finish()
        session.prepare()
    kernels = core.info.attention_backend
    row: dict[str, Any] = {
        "case": f"{options.model} warm-up",
        "time_s": time.perf_counter() - begun_s,
    }
    if options.device == "cuda" and kernels != "triton":
        row |= {"is_right": False, "failed": f"computed by {kernels}; the log says why"}
    print_row({**row, "attention_backend": kernels})
    return 0


if __name__ == "__main__":
    sys.exit(main())
