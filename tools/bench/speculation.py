"""What speculation gains on a model: tokens a second with it over those without, in turn.

    python -m tools.bench.speculation demo/model --draft demo/draft \\
        --questions tests/demo/heldout.jsonl

The same prompts are continued by one engine for each way to guess, round after round; a round's
time is that of its steps after the first of each batch, which computes the prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from engine.core import EngineCore
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.types import Request, SamplingParams


class _Round(NamedTuple):
    rate: float  # tokens a second
    tokens_a_step: float


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory in Hugging Face format, with a chat template")
    parser.add_argument("--draft", required=True, help="its draft model's directory")
    parser.add_argument(
        "--questions", type=Path, required=True, help='JSON lines with "messages" each'
    )
    parser.add_argument("--num-questions", type=int, default=12)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    requests = _requests(options)
    cores = {
        name: EngineCore.load(_config(options, speculation))
        for name, speculation in _ways(options).items()
    }
    rounds: dict[str, list[_Round]] = {name: [] for name in cores}
    for number in range(options.rounds + 1):  # the first is to warm up
        for name, core in cores.items():
            made = _run(core, requests, options.concurrency)
            if number:
                rounds[name].append(made)
    plain = statistics.median(one.rate for one in rounds["off"])
    told: dict[str, Any] = {
        "model": Path(options.model).name,
        "concurrency": options.concurrency,
        "ignore_eos": options.ignore_eos,
        "tokens_per_s": plain,
    }
    for name, each in rounds.items():
        drafts = cores[name].stats.drafts
        told[name] = {
            "ratio": statistics.median(one.rate for one in each) / plain,
            "tokens_a_step": statistics.median(one.tokens_a_step for one in each),
            "rates": [round(one.rate) for one in each],
            "drafted": drafts.num_draft_tokens,
            "accepted": drafts.num_accepted_tokens,
        }
    print(json.dumps(told))
    return 0


def _ways(options: argparse.Namespace) -> dict[str, SpeculationConfig | None]:
    most = options.num_draft_tokens
    draft = SpeculationConfig(
        method="draft", draft_model=options.draft, num_draft_tokens=most, adaptive=False
    )
    return {
        "off": None,
        "draft, always the most": draft,
        "draft": SpeculationConfig(
            method="draft", draft_model=options.draft, num_draft_tokens=most
        ),
        "ngram": SpeculationConfig(method="ngram", num_draft_tokens=most),
    }


def _config(options: argparse.Namespace, speculation: SpeculationConfig | None) -> EngineConfig:
    return EngineConfig(
        model=options.model,
        num_threads=options.threads,
        cache=CacheConfig(num_blocks=4096, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=options.concurrency),
        speculation=speculation,
    )


def _requests(options: argparse.Namespace) -> list[Request]:
    tokenizer = Tokenizer.from_dir(options.model)
    template = ChatTemplate.from_dir(options.model, tokenizer, None)
    lines = options.questions.read_text().splitlines()
    chosen = lines[:: max(1, len(lines) // options.num_questions)][: options.num_questions]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=options.max_tokens, ignore_eos=options.ignore_eos, seed=1
    )
    requests = []
    for index, line in enumerate(chosen):
        prompt = template.encode_chat_sync(json.loads(line)["messages"])
        requests.append(Request(id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling))
    template.close()
    return requests


def _run(core: EngineCore, requests: Sequence[Request], concurrency: int) -> _Round:
    num_tokens = num_steps = 0
    seconds = 0.0
    for begin in range(0, len(requests), concurrency):
        for request in requests[begin : begin + concurrency]:
            core.add(request)
        is_first = True
        while core.has_work:
            begun_s = time.perf_counter()
            output = core.step()
            if not is_first:
                seconds += time.perf_counter() - begun_s
                num_tokens += sum(map(len, output.token_ids))
                num_steps += 1
            is_first = False
    return _Round(num_tokens / seconds, num_tokens / num_steps)


if __name__ == "__main__":
    sys.exit(main())
