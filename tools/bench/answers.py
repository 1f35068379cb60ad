"""The same model in several files: how many questions each answers correctly, and how fast.

    python -m tests.gguf_files demo/model build/gguf --types Q8_0 Q4_0
    python -m tools.bench.answers demo/model build/gguf/*.gguf

Each file is loaded in a process of its own, in bfloat16 as it would be served. Questions are
answered greedily. Speeds are those of decode steps at 1 and 16 rows, in tokens per second of CPU
time, which other work on the machine affects little. Prints a line of JSON for each model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_QUESTIONS = Path("tests/demo/heldout.jsonl")
_PROMPT_TOKENS, _OUTPUT_TOKENS, _ROUNDS = 64, 128, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="directories and GGUF files")
    parser.add_argument("--questions", type=Path, default=_QUESTIONS, help="JSON lines")
    parser.add_argument("--num-questions", type=int, help="only the first so many")
    parser.add_argument("--child", action="store_true", help="be a measured process")
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(_measure(options.models[0], options.questions, options.num_questions)))
        return 0
    shared = ["--child", "--questions", str(options.questions)]
    if options.num_questions is not None:
        shared += ["--num-questions", str(options.num_questions)]
    command = [sys.executable, "-m", "tools.bench.answers", *shared]
    return max(
        subprocess.run([*command, model], check=False).returncode for model in options.models
    )


def _measure(model: str, questions: Path, num_questions: int | None) -> dict[str, Any]:
    from engine import LLM
    from tools.quantize.questions import count_correct_answers, read_questions

    asked = read_questions(questions)[:num_questions]
    with LLM(model, dtype="bfloat16", use_tqdm=False, enable_prefix_caching=False) as llm:
        result: dict[str, Any] = {"model": Path(model).name, "questions": len(asked)}
        result["right"] = count_correct_answers(llm, asked)
        for rows in (1, 16):
            prompts = [[7 + row] * _PROMPT_TOKENS for row in range(rows)]
            rates = []
            for _ in range(_ROUNDS):
                before = _cpu_seconds(llm, prompts, 1)
                after = _cpu_seconds(llm, prompts, 1 + _OUTPUT_TOKENS)
                rates.append(rows * _OUTPUT_TOKENS / (after - before))
            result[f"tokens_per_cpu_s_{rows}"] = round(sorted(rates)[_ROUNDS // 2], 1)
    return result


def _cpu_seconds(llm: Any, prompts: list[list[int]], num_tokens: int) -> float:
    from engine import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    begun_s = time.process_time()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.process_time() - begun_s


if __name__ == "__main__":
    sys.exit(main())
