"""Steps against their floors: decoding at several batch sizes and contexts, and prompts.

The floor of a decode step is that of its weights plus the bytes of the context's keys and values
over the memory bandwidth; that of the weights is their bytes or their products, whichever takes
longer. The floor of a prompt is its products over the matrix throughput, or the bytes of the
weights over the memory bandwidth. Short prompts are measured as captured steps, and those of plain
models as launched ones too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from kernels.bench.case import Ceilings
from tools.bench.ceilings import measure
from tools.bench.session import MAX_STEP_TOKENS, TINY, Session, load_core, parser, print_row, timed
from tools.bench.shapes import attention_flops, matrix_parameters

_CASES = [
    *((rows, 1024) for rows in (1, 8, 32, 64, 128, 256)),
    *((rows, 4096) for rows in (1, 8, 32)),  # more would mostly measure their prompts
]
_FEW_CASES = [(rows, 1024) for rows in (1, 32, 256)]
_QUANTISED_CASES = [(rows, 1024) for rows in (1, 8, 32, 64, 256)]
_TINY_CASES = [(1, 24), (3, 40)]
_WARM_UP_STEPS, _STEPS = 8, 32
_PROMPT, _TINY_PROMPT = 8192, 96
_SHORT_PROMPTS, _TINY_SHORT_PROMPTS = (32, 128, 512), (16,)
# Bytes of a weight: its code, and its part of a group's scale (``engine/quantization/online.py``).
_WEIGHT_BYTES = {None: 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 2 / 32, "nf4": 0.5 + 2 / 64}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each case as it is measured."""
    asked = parser(__doc__, "qwen3-0.6b", "llama-3.1-8b")
    asked.add_argument("--batch-invariant", action="store_true", help="and fewer cases")
    kinds = [kind for kind in _WEIGHT_BYTES if kind is not None]
    asked.add_argument("--quantization", choices=kinds, help="of the weights, and fewer cases")
    options = asked.parse_args(argv)
    ceilings = measure(options.device)
    is_tiny = options.model == TINY
    cases = _QUANTISED_CASES if options.quantization is not None else _CASES
    cases = _FEW_CASES if options.batch_invariant else cases
    core = load_core(
        options,
        max_model_len=_PROMPT + 64,
        batch_invariant=options.batch_invariant,
        quantization=options.quantization,
    )
    session = Session(core)
    short = _TINY_SHORT_PROMPTS if is_tiny else _SHORT_PROMPTS
    print_row(_prompt(session, options, ceilings, _TINY_PROMPT if is_tiny else _PROMPT))
    is_plain = options.quantization is None and not options.batch_invariant
    for length in short if is_plain else ():
        print_row(_prompt(session, options, ceilings, length, "launched"))
    session.prepare()
    for length in short:
        print_row(_prompt(session, options, ceilings, length, "captured"))
    for rows, context in _TINY_CASES if is_tiny else cases:
        print_row(_decode(session, options, ceilings, rows, context))
    return 0


def _prompt(
    session: Session,
    options: argparse.Namespace,
    ceilings: Ceilings,
    length: int,
    kind: str | None = None,
) -> dict[str, Any]:
    """Measure one prompt, alone in one step; ``kind`` of short ones."""
    rng = random.Random(length)
    taken: list[float] = []
    for _ in range(4 if kind is None else 12):
        session.submit(random_ids(length, rng), 1)
        with timed(options.device) as seconds:
            session.finish()
        taken += seconds
    in_layers, output = matrix_parameters(options.model)
    flops = 2 * in_layers * length + 2 * output + attention_flops(options.model, length)
    weight_bytes = _WEIGHT_BYTES[options.quantization] * (in_layers + output)
    floor_s = max(flops / ceilings.flops_per_s, weight_bytes / ceilings.bytes_per_s)
    time_s = statistics.median(taken[1:])  # the first one warms up
    case = f"prefill {length}" if kind is None else f"prompt {length} {kind}"
    return _row(f"{_model(options)} {case}", time_s, floor_s)


def begin_decoding(session: Session, rows: int, context: int, num_steps: int) -> bool:
    """Bring ``rows`` sequences of about ``context`` tokens to the point where all of them decode.

    They have room for ``num_steps`` more tokens each. Returns False if the KV cache is too small.
    """
    # Early sequences decode while later prompts are computed, at worst two prompts per step.
    block_size = session.core.info.memory.block_size
    limit = _WARM_UP_STEPS + num_steps + 16 + 2 * rows * context // MAX_STEP_TOKENS
    if rows * (context + limit + block_size) > session.capacity_tokens:
        return False
    session.prepare()
    rng = random.Random(f"{rows} {context}")
    for _ in range(rows):
        session.submit(random_ids(context - num_steps // 2, rng), limit)
    while session.step() < rows:
        pass  # until a step gives every sequence a token
    for _ in range(_WARM_UP_STEPS):
        session.step()
    return True


def _decode(
    session: Session,
    options: argparse.Namespace,
    ceilings: Ceilings,
    rows: int,
    context: int,
) -> dict[str, Any]:
    """Measure steps in which ``rows`` sequences of about ``context`` tokens gain one token each."""
    name = f"{_model(options)} decode {rows} x {context}"
    if not begin_decoding(session, rows, context, _STEPS):
        return {"case": name, "skipped": "the KV cache is too small"}
    with timed(options.device) as seconds:
        made = sum(session.step() for _ in range(_STEPS))
    session.abort()
    parameters = sum(matrix_parameters(options.model))
    weights_s = max(
        _WEIGHT_BYTES[options.quantization] * parameters / ceilings.bytes_per_s,
        2 * parameters * rows / ceilings.flops_per_s,
    )
    per_token = session.core.info.memory.bytes_per_token
    floor_s = weights_s + rows * context * per_token / ceilings.bytes_per_s
    return _row(name, seconds[0] * rows / made, floor_s, rows=rows)


def _model(options: argparse.Namespace) -> str:
    """Return the model's name in rows."""
    kind = options.quantization
    return options.model if kind is None else f"{options.model} {kind}"


def _row(case: str, time_s: float, floor_s: float, rows: int | None = None) -> dict[str, Any]:
    row = {
        "case": case,
        "time_ms": time_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "share_of_floor": floor_s / time_s,
    }
    return row if rows is None else {**row, "tokens_per_s": rows / time_s}


def random_ids(count: int, rng: random.Random) -> list[int]:
    """The tokens of a prompt."""
    return [rng.randrange(3, 10_000) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
