"""The speedup from speculation on a model: tokens/s with it over tokens/s without it.

    python -m tools.bench.speculation demo/model --draft demo/draft \\
        --questions tests/demo/heldout.jsonl --concurrency 1 --output results.json

The same prompts are continued greedily by one engine for each drafting method, round after round.
Within a round the engines alternate every few steps, so that disturbances of the machine affect all
of them. Their order is random each time, since what one engine leaves in the CPU caches helps the
next. Only steps after those that compute prompts count, in each batch. A ratio is the median over
rounds of an engine's rate over that of the one without speculation, both by wall-clock time and by
process CPU time. A second engine without speculation shows how much of it is noise. With
``--again`` each question has been asked and answered earlier in its conversation, so that the
answer can be copied.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from engine.core import EngineCore
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.types import Request, SamplingParams

_OFF, _CONTROL = "off", "off, once more"


class _Round(NamedTuple):
    rate: float  # tokens per second
    cpu_rate: float  # tokens per second of process CPU time
    tokens_per_step: float
    num_draft_steps: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON, and write it to ``--output`` if given."""
    options = _parser().parse_args(argv)
    cores = {
        name: EngineCore.load(_config(options, speculation))
        for name, speculation in _methods(options).items()
        if name in (_OFF, _CONTROL) or not options.ways or name in options.ways
    }
    requests = _requests(options, cores[_OFF])
    rounds: dict[str, list[_Round]] = {name: [] for name in cores}
    chance, began_s = random.Random(1), time.perf_counter()
    for number in range(options.rounds + options.warm_rounds):
        made = _round(cores, requests, options, chance)
        if number >= options.warm_rounds:
            for name, one in made.items():
                rounds[name].append(one)
        if time.perf_counter() - began_s > options.limit_s and rounds[_OFF]:
            break
    result = {**_setting(options), "ways": _summarize(cores, rounds)}
    line = json.dumps(result)
    print(line)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a directory in Hugging Face format, with a chat template")
    add("--draft", required=True, help="its draft model's directory")
    add("--questions", type=Path, required=True, help='JSON lines with "messages" each')
    add("--num-questions", type=int, default=12)
    add("--again", action="store_true", help="the longest answers once more")
    add("--concurrency", type=int, default=1)
    add("--max-tokens", type=int, default=96)
    add("--ignore-eos", action="store_true")
    add("--num-draft-tokens", type=int, default=4)
    add("--rounds", type=int, default=9)
    add("--warm-rounds", type=int, default=1, help="that do not count")
    add("--limit-s", type=float, default=100.0, help="no round begins after")
    add("--turn-steps", type=int, default=8, help="of an engine, before it is the next one's turn")
    add("--threads", type=int, default=1)
    add("--ways", action="append", help="only these, beside off")
    add("--output", type=Path, help="a file for the result")
    return parser


def _methods(options: argparse.Namespace) -> dict[str, SpeculationConfig | None]:
    ways: dict[str, SpeculationConfig | None] = {_OFF: None, _CONTROL: None}
    for method in ("draft", "ngram", "suffix"):
        draft_model = options.draft if method == "draft" else None
        for adaptive in (True, False):
            ways[method if adaptive else f"{method}, always the most"] = SpeculationConfig(
                method=method,
                draft_model=draft_model,
                num_draft_tokens=options.num_draft_tokens,
                adaptive=adaptive,
            )
    return ways


def _config(options: argparse.Namespace, speculation: SpeculationConfig | None) -> EngineConfig:
    return EngineConfig(
        model=options.model,
        num_threads=options.threads,
        cache=CacheConfig(num_blocks=4096, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=options.concurrency),
        speculation=speculation,
    )


def _setting(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": Path(options.model).name,
        "workload": "again" if options.again else "questions",
        "num_questions": options.num_questions,
        "concurrency": options.concurrency,
        "max_tokens": options.max_tokens,
        "ignore_eos": options.ignore_eos,
        "num_draft_tokens": options.num_draft_tokens,
        "threads": options.threads,
        "torch": torch.__version__,
    }


def _summarize(cores: dict[str, EngineCore], rounds: dict[str, list[_Round]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name, each in rounds.items():
        pairs = list(zip(each, rounds[_OFF], strict=True))
        ratios = [own.rate / off.rate for own, off in pairs]
        cpu_ratios = [own.cpu_rate / off.cpu_rate for own, off in pairs]
        drafts = cores[name].stats.drafts
        summary[name] = {
            "tokens_per_s": round(statistics.median(one.rate for one in each)),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 2) for ratio in ratios],
            "cpu_us_a_token": round(statistics.median(1e6 / one.cpu_rate for one in each), 1),
            "cpu_ratio": round(statistics.median(cpu_ratios), 3),
            "draft_steps_a_round": round(statistics.mean(one.num_draft_steps for one in each), 1),
            "tokens_a_step": round(statistics.median(one.tokens_per_step for one in each), 2),
            "drafted": drafts.num_draft_tokens,
            "accepted": drafts.num_accepted_tokens,
        }
    return summary


def _requests(options: argparse.Namespace, core: EngineCore) -> list[Request]:
    """The questions, sampled evenly; with ``--again``, those with the longest answers."""
    tokenizer = Tokenizer.from_dir(options.model)
    template = ChatTemplate.from_dir(options.model, tokenizer, None)
    lines = options.questions.read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["messages"] for line in lines]
    if options.again:
        answers = _answers(core, [template.encode_chat_sync(messages) for messages in asked])
        ranked = sorted(zip(answers, asked, strict=True), key=lambda pair: -len(pair[0]))
        asked = [
            [*messages, {"role": "assistant", "content": tokenizer.decode(answer)}, messages[-1]]
            for answer, messages in ranked[: options.num_questions]
        ]
    chosen = asked[:: max(1, len(asked) // options.num_questions)][: options.num_questions]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=options.max_tokens, ignore_eos=options.ignore_eos, seed=1
    )
    prompts = [tuple(template.encode_chat_sync(messages)) for messages in chosen]
    template.close()
    return [
        Request(id=str(index), prompt_token_ids=prompt, sampling=sampling)
        for index, prompt in enumerate(prompts)
    ]


def _answers(core: EngineCore, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The model's answers, without the end token."""
    sampling = SamplingParams(temperature=0.0, max_tokens=96, seed=1)
    for index, prompt in enumerate(prompts):
        core.add(Request(id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling))
    answers: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        output = core.step()
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            answers[int(row_id)] += tokens
    ends = core.info.eos_token_ids
    return [[token for token in answer if token not in ends] for answer in answers]


def _round(
    cores: dict[str, EngineCore],
    requests: Sequence[Request],
    options: argparse.Namespace,
    chance: random.Random,
) -> dict[str, _Round]:
    """Run all requests on each engine, a few steps at a time."""
    runs = {name: _run(core, requests, options.concurrency) for name, core in cores.items()}
    order, made = list(runs), {}
    while len(made) < len(runs):
        chance.shuffle(order)
        for name in order:
            try:
                for _ in range(0 if name in made else options.turn_steps):
                    next(runs[name])
            except StopIteration as end:
                made[name] = end.value
    return made


def _run(
    core: EngineCore, requests: Sequence[Request], concurrency: int
) -> Generator[None, None, _Round]:
    """Run all requests, ``concurrency`` at a time, one step per ``next()``; returns the figures."""
    num_tokens = num_steps = num_draft_steps = 0
    seconds = cpu_seconds = 0.0
    for begin in range(0, len(requests), concurrency):
        batch = requests[begin : begin + concurrency]
        for request in batch:
            core.add(request)
        begun: set[str] = set()
        while core.has_work:
            counts = len(begun) == len(batch)
            num_drafts = core.stats.drafts.num_drafts
            begun_s, cpu_begun_s = time.perf_counter(), time.process_time()
            output = core.step()
            begun.update(output.ids)
            if counts:
                seconds += time.perf_counter() - begun_s
                cpu_seconds += time.process_time() - cpu_begun_s
                num_tokens += sum(map(len, output.token_ids))
                num_steps += 1
                num_draft_steps += core.stats.drafts.num_drafts > num_drafts
            yield
    return _Round(
        num_tokens / seconds, num_tokens / cpu_seconds, num_tokens / num_steps, num_draft_steps
    )


if __name__ == "__main__":
    sys.exit(main())
