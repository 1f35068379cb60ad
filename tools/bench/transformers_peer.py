"""Transformers' own continuous batching on a quarter of the 256-sequence benchmark.

The shapes, sequences and lengths are those of ``tools.bench.throughput``; everything else is left
at Transformers' defaults. It is a weak peer, but one that is always installed. After 30 seconds it
is stopped: its rate is that of the tokens it has made by then, while most sequences still run.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from tools.bench.session import TINY, parser, print_row
from tools.bench.shapes import CONFIGS
from tools.bench.workload import Job, sample_jobs

_WARM_UP_TOKENS = 8
_MAX_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON."""
    options = parser(__doc__, "qwen3-0.6b", "llama-3.1-8b").parse_args(argv)
    from transformers import GenerationConfig

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = _random_model(options.model, options.device)
    jobs = sample_jobs(is_tiny=options.model == TINY)
    longest = max(job.num_output for job in jobs)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1)
    with torch.no_grad(), model.continuous_batching_context_manager(config) as manager:
        warm_up = [Job(job.prompt, _WARM_UP_TOKENS) for job in jobs[:2]]
        _run(manager, warm_up, model.config.vocab_size)
        begun_s = time.perf_counter()
        tokens = _run(manager, jobs, model.config.vocab_size, begun_s + _MAX_S)
        seconds = time.perf_counter() - begun_s
        print_row(
            {
                "case": f"{options.model} {len(jobs)} sequences",
                "time_s": seconds,
                "output_tokens": tokens,
                "is_complete": tokens == sum(job.num_output for job in jobs),
                "tokens_per_s": tokens / seconds,
            }
        )
        manager.stop(hard_stop=True)
    return 0


def _random_model(name: str, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = CONFIGS[name]
    made = AutoConfig.for_model(**config)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()


def _run(manager: Any, jobs: Sequence[Job], vocab: int, deadline_s: float | None = None) -> int:
    """The number of tokens generated, by all sequences or until the deadline.

    Raises:
        RuntimeError: a request failed or is not of full length.
    """
    for job in jobs:
        ids = [token % vocab for token in job.prompt]
        manager.add_request(ids, max_new_tokens=job.num_output, eos_token_id=-1, streaming=True)
    made: dict[str, int] = {}
    left = len(jobs)
    while left:
        wait_s = 60.0 if deadline_s is None else deadline_s - time.perf_counter()
        if wait_s <= 0:
            return sum(made.values())
        result = manager.get_result(timeout=wait_s)
        if result is None and deadline_s is not None and manager.is_running():
            continue
        if result is None or result.error:
            raise RuntimeError(f"transformers: {result.error if result else 'no answer'}")
        made[result.request_id] = len(result.generated_tokens)
        left -= result.is_finished()
    tokens, wanted = sum(made.values()), sum(job.num_output for job in jobs)
    if tokens != wanted:
        raise RuntimeError(f"transformers made {tokens} tokens where {wanted} were asked for")
    return tokens


if __name__ == "__main__":
    sys.exit(main())
