"""Trains the demo model: AdamW, warm-up, plateau, linear decay; a checkpoint after each shard.

    python -m demo.train --shards 32 --threads 1

An interrupted run continues from its last checkpoint and ends with the same weights.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaForCausalLM

from demo import corpus
from demo.batches import Batch, shard_batches
from demo.modelling import export, new_model, num_parameters
from demo.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

WORK = Path(__file__).with_name("_work")
NUM_SHARDS = 38
PEAK_RATE = 2e-3
WARM_UP_STEPS = 100
# (shard, share of the peak rate), interpolated linearly.
RATE_POINTS = (
    (0, 1.0),
    (17, 1.0),
    (22, 2 / 3),
    (32, 2 / 3 - (2 / 3 - 0.01) * 10 / 13),
    (32, 0.3),
    (NUM_SHARDS, 0.01),
)
# Questions and tool lists teach copying early, but user messages are not worth memorising.
PROMPT_LOSS_WEIGHT = 0.15
SHORT_ROW = 400


def learning_rate(step: int, shard: float) -> float:
    """The learning rate at optimiser step `step`, after `shard` shards (may be fractional)."""
    if step < WARM_UP_STEPS:
        return PEAK_RATE * (step + 1) / WARM_UP_STEPS
    for (start, high), (end, low) in pairwise(RATE_POINTS):
        if shard <= end:
            return PEAK_RATE * (high + (low - high) * (shard - start) / (end - start))
    return PEAK_RATE * RATE_POINTS[-1][1]


def compute_losses(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean cross-entropy over the answers, and over the sampled tokens of the rest.

    Logits are computed for those tokens only. The second loss is zero if it has no tokens.
    """
    wanted = batch.is_answer | batch.is_sampled_prompt
    # On short rows plain matrix products are faster than the CPU's fused attention, by a fifth of
    # the step.
    short = batch.inputs.shape[1] < SHORT_ROW
    model.config._attn_implementation = "eager" if short else "sdpa"
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(batch.inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[wanted])  # [num_wanted, vocab]
    each = functional.cross_entropy(logits.float(), batch.targets[wanted], reduction="none")
    in_answer = batch.is_answer[wanted]
    return each[in_answer].mean(), each[~in_answer].sum() / max(1, int((~in_answer).sum()))


def train(
    folder: Path, work: Path = WORK, num_shards: int = NUM_SHARDS, minutes: float = 0
) -> dict:
    """Train to `num_shards` shards, or for `minutes` (0: no limit), then export.

    Returns the run's record: shards, steps, tokens, seconds, parameters, last loss.
    """
    work.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(), folder)
    tokenizer = load_tokenizer(folder)
    model = new_model(corpus.SEED)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    kept = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": kept, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
        fused=True,
    )
    record = _resume(work / "checkpoint.pt", model, optimizer)
    record |= {
        "parameters": num_parameters(model),
        "planned_shards": num_shards,
        "threads": torch.get_num_threads(),
    }
    model.train()
    started = time.monotonic()
    for index in range(record["shards"], num_shards):
        began = time.monotonic()
        _train_shard(model, optimizer, tokenizer, index, num_shards, record)
        record["shards"] = index + 1
        record["seconds"] += time.monotonic() - began
        _save(work, model, optimizer, record)
        if minutes and time.monotonic() - started > 60 * minutes:
            break
    export(model, folder)
    return record


def _train_shard(model, optimizer, tokenizer, index: int, num_shards: int, record: dict) -> None:
    batches = list(shard_batches(tokenizer, index))
    total = 0.0
    bar = tqdm(batches, desc=f"shard {index + 1}/{num_shards}", mininterval=5)
    for done, batch in enumerate(bar, 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(record["steps"], index + done / len(batches))
        loss, asked_loss = compute_losses(model, batch)
        (loss + PROMPT_LOSS_WEIGHT * asked_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        record["steps"] += 1
        record["tokens"] += batch.num_tokens
        record["answer_tokens"] += int(batch.is_answer.sum())
        bar.set_postfix(loss=f"{total / done:.4f}", refresh=False)
    record["loss"] = total / len(batches)


def _resume(path: Path, model, optimizer) -> dict:
    if not path.exists():
        return {"shards": 0, "steps": 0, "tokens": 0, "answer_tokens": 0, "seconds": 0.0}
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["record"]


def _save(work: Path, model, optimizer, record: dict) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "record": record}
    partial = work / "checkpoint.partial"
    torch.save(state, partial)
    partial.replace(work / "checkpoint.pt")
    (work / "record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("model"))
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--shards", type=int, default=NUM_SHARDS)
    parser.add_argument("--minutes", type=float, default=0, help="stop after so many; 0: never")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(train(args.out, args.work, args.shards, args.minutes)))


if __name__ == "__main__":
    main()
