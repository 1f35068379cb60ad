"""Documents that the teacher writes: what a draft has to foresee is the teacher's own text.

A prompt is a document up to what was first to be learned (the question of a chat, the prompt of a
completion), or its first tokens where all was. The teacher goes on from there, sampled or
greedily, and what it wrote is what the student learns. Sequence-level distillation: Kim and Rush,
"Sequence-Level Knowledge Distillation" (2016).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.distill.documents import Documents
from tools.distill.errors import DistillError
from tools.distill.settings import Generation, Settings

_FILE = "generated.jsonl"


def generate(settings: Settings, teacher: Any, tokenizer: Any, documents: Documents | None) -> Path:
    """Have the teacher write; returns the file, of {"ids", "learn_from", "text"} lines.

    What a run that was stopped has written is kept: batch i is a function of (seed, i).

    Raises DistillError where there is nothing to begin with.
    """
    asked = settings.generation
    path = settings.work_folder / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    prompts = _prompts(settings, tokenizer, documents)
    lines = _whole_lines(path)
    done = len(lines) // asked.batch_rows * asked.batch_rows  # whole batches only
    path.write_text("".join(lines[:done]), encoding="utf-8")

    from tqdm import tqdm

    bar = tqdm(
        total=asked.num_documents, initial=min(done, asked.num_documents), unit="document",
        desc="generating", file=sys.stderr,
    )  # fmt: skip
    with bar, path.open("a", encoding="utf-8") as file:
        for first in range(done, asked.num_documents, asked.batch_rows):
            batch = [
                prompts[i % len(prompts)]
                for i in range(first, min(first + asked.batch_rows, asked.num_documents))
            ]
            torch.manual_seed(settings.seed * 1_000_003 + first)
            for prompt, written in zip(
                batch, continue_prompts(asked, teacher, tokenizer, batch), strict=True
            ):
                ids = [*prompt, *written]
                row = {"ids": ids, "learn_from": len(prompt), "text": tokenizer.decode(ids)}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(batch))
    return path


def _prompts(settings: Settings, tokenizer: Any, documents: Documents | None) -> list[list[int]]:
    if documents is None:
        start = tokenizer.bos_token_id
        start = tokenizer.eos_token_id if start is None else start
        if start is None:
            raise DistillError("--generate: the tokenizer has no token to begin with; give --data")
        return [[start]]
    order = np.random.default_rng((settings.seed, 3)).permutation(len(documents))
    prompts = []
    for i in order[: settings.generation.num_documents]:
        tokens, learn = documents[int(i)]
        asked = int(learn.argmax()) if not learn[: settings.generation.prompt_tokens].all() else 0
        cut = asked or min(settings.generation.prompt_tokens, len(tokens) - 1)
        prompts.append(tokens[:cut].tolist())
    return prompts


def continue_prompts(
    asked: Generation, teacher: Any, tokenizer: Any, prompts: list[list[int]]
) -> list[list[int]]:
    """What the teacher writes after each prompt (token ids), its end token included."""
    device = next(teacher.parameters()).device
    longest = max(map(len, prompts))
    ends = _ends(teacher, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    ids = torch.full((len(prompts), longest), pad)
    there = torch.zeros((len(prompts), longest), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        there[row, longest - len(prompt) :] = 1
    sampled = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        out = teacher.generate(
            input_ids=ids.to(device),
            attention_mask=there.to(device),
            max_new_tokens=asked.max_new_tokens,
            pad_token_id=pad,
            use_cache=True,
            **(sampled if asked.temperature > 0 else {"do_sample": False}),
        )
    written = []
    for row in out[:, longest:].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        written.append(row[:stop])
    return written


def _ends(teacher: Any, tokenizer: Any) -> set[int]:
    ends = teacher.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []
    return {*ends, tokenizer.eos_token_id} - {None}


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]
