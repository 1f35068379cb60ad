"""Continuous batching against one request at a time: ``python -m loadtest.against_transformers``.

Both sides get the same prompts, decode greedily to full length, and use the same weights, dtype and
number of threads. Hugging Face ``generate`` takes the prompts one after the other; Quire's server
takes them with many in flight. Rounds alternate (A B A B), each with new prompts so that no cache
carries over. The result is the median of each side and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.client import Client, raw_json
from loadtest.driver import Endpoint, Load, send_all
from loadtest.machine import describe_machine, tree_cpu_s
from loadtest.models import SHAPES, ensure_model
from loadtest.process import RunningServer, running_server
from loadtest.summary import summarize
from loadtest.workloads import SampleRequest

_NUM_COMPARED = 4  # prompts whose output is compared on both sides before timing starts


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and a line of JSON, and write the result to ``--out`` if given."""
    options = _parser().parse_args(argv)
    directory, label = _model_directory(options)
    arguments = [str(directory), "--num-threads", str(options.threads), "--dtype", options.dtype]
    with running_server([*arguments, "--served-model-name", "model"]) as server:
        result = asyncio.run(_compare(server, directory, options))
    result = {"model": label, "machine": describe_machine(), **result}
    print(
        f"{label}: transformers {result['transformers_tokens_per_s']:.1f}, "
        f"Quire {result['quire_tokens_per_s']:.1f} output tokens/s: {result['ratio']:.2f}x"
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.against_transformers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="100m", help=f"a directory, or one of {', '.join(sorted(SHAPES))}")
    add("--models-dir", type=Path, default=Path("loadtest/out/models"), help="where those are made")
    add("--requests", type=int, default=32, help="in each round of either side")
    add("--concurrency", type=int, default=16, help="requests in flight at Quire's server")
    add("--input-len", type=int, default=256)
    add("--output-len", type=int, default=64)
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="file for the result")
    return parser


async def _compare(
    server: RunningServer, directory: Path, options: argparse.Namespace
) -> dict[str, Any]:
    generate = _load_transformers(directory, options.dtype, options.threads)
    vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
    client = Client(server.url)
    endpoint = Endpoint(False, "model", {"temperature": 0.0, "ignore_eos": True})

    def prompts(count: int, label: object) -> list[list[int]]:
        rng = random.Random(f"{options.seed} {label}")
        return [
            [rng.randrange(vocab // 8, vocab) for _ in range(options.input_len)]
            for _ in range(count)
        ]

    same = await _count_matching_texts(
        client, generate, prompts(_NUM_COMPARED, "compared"), options
    )
    rounds: list[dict[str, Any]] = []
    for number in range(-1, options.rounds):  # round -1 warms up both sides
        asked = prompts(options.requests if number >= 0 else 2, number)
        begun_s = time.perf_counter()
        for prompt in asked:
            generate(prompt, options.output_len)
        alone_s = time.perf_counter() - begun_s
        asks = [SampleRequest(prompt, options.output_len) for prompt in asked]
        load, cpu_s = Load(concurrency=options.concurrency), tree_cpu_s(server.pid) or 0.0
        begun_s = time.perf_counter()
        summary = summarize(await send_all(client, endpoint, asks, load, random.Random(0)))
        served_s = time.perf_counter() - begun_s
        wanted = len(asked) * options.output_len
        if summary["output_tokens"] != wanted:
            raise RuntimeError(f"the server made {summary['output_tokens']} of {wanted} tokens")
        if number >= 0:
            rounds.append(
                {
                    "transformers_tokens_per_s": wanted / alone_s,
                    "quire_tokens_per_s": wanted / served_s,
                    "ratio": alone_s / served_s,
                    "quire_cpu_cores": ((tree_cpu_s(server.pid) or cpu_s) - cpu_s) / served_s,
                    "quire_itl_ms": summary["itl_ms"],
                }
            )
            print(f"round {number + 1}: {rounds[-1]['ratio']:.2f}x", file=sys.stderr)
    client.close()
    keys = ("transformers_tokens_per_s", "quire_tokens_per_s", "ratio", "quire_cpu_cores")
    settings = ("requests", "concurrency", "input_len", "output_len", "threads", "dtype", "seed")
    return {
        **{key: getattr(options, key) for key in settings},
        **{key: statistics.median(each[key] for each in rounds) for key in keys},
        "same_texts": f"{same} of {_NUM_COMPARED}",
        "rounds": rounds,
    }


async def _count_matching_texts(
    client: Client,
    generate: Callable[[list[int], int], str],
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
) -> int:
    """Count the prompts for which both sides produce the same text.

    Random weights at low precision have near ties, so a few outputs may differ; if none matched,
    the two sides would not be computing the same thing.
    """
    same = 0
    for prompt in prompts:
        body = {"model": "model", "prompt": prompt, "max_tokens": options.output_len}
        asked = {**body, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
        answer = raw_json(await client.fetch("POST", "/v1/completions", asked))
        same += answer["choices"][0]["text"] == generate(prompt, options.output_len)
    return same


def _load_transformers(
    directory: Path, dtype: str, threads: int
) -> Callable[[list[int], int], str]:
    """Return a function of (prompt ids, output length) that returns the continuation as text."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))

    def generate(prompt: list[int], length: int) -> str:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=length,
                min_new_tokens=length,
                eos_token_id=None,
                pad_token_id=0,
            )
        return str(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=False))

    return generate


def _model_directory(options: argparse.Namespace) -> tuple[Path, str]:
    """The model directory to serve, and a name for it."""
    shape = SHAPES.get(options.model)
    if shape is None:
        path = Path(options.model)
        return path, "demo" if path.parts[-2:] == ("demo", "model") else path.name
    directory = options.models_dir / f"{options.model}-{options.dtype}"
    return ensure_model(shape, directory, dtype=options.dtype), options.model


if __name__ == "__main__":
    sys.exit(main())
