"""The 256-sequence benchmark, offline: output tokens per second over the whole batch.

A second, smaller run takes the same sequences as the peer, so that the two can be compared
(``tools.bench.transformers_peer``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tools.bench.session import TINY, Session, load_core, parser, print_row, timed
from tools.bench.workload import Job, full_jobs, sample_jobs

_LONGEST = 2048 + 64  # prompt and output of the longest job, with some margin


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each batch."""
    options = parser(__doc__, "qwen3-0.6b", "llama-3.1-8b").parse_args(argv)
    is_tiny = options.model == TINY
    session = Session(load_core(options, max_model_len=_LONGEST))
    session.submit([1] * 16, 8)
    session.finish()  # warm-up
    session.prepare()
    sample = sample_jobs(is_tiny=is_tiny)
    for jobs in (full_jobs(is_tiny=is_tiny), sample):
        tokens = sum(job.num_output for job in jobs)
        seconds = _run(session, jobs, options.device)
        print_row(
            {
                "case": f"{options.model} {len(jobs)} sequences",
                "time_s": seconds,
                "prompt_tokens": sum(len(job.prompt) for job in jobs),
                "output_tokens": tokens,
                "tokens_per_s": tokens / seconds,
            }
        )
    return 0


def _run(session: Session, jobs: Sequence[Job], device: str) -> float:
    wanted = session.num_tokens + sum(job.num_output for job in jobs)
    with timed(device) as seconds:
        for job in jobs:
            session.submit(job.prompt, job.num_output)
        session.finish()
    if session.num_tokens != wanted:
        raise RuntimeError(f"{session.num_tokens} tokens where {wanted} were asked for")
    return seconds[0]


if __name__ == "__main__":
    sys.exit(main())
