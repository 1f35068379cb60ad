"""Makes the demo model's draft: distils it, trains the same student on labels alone, and compares.

    python -m demo.draft

Writes the corpus, runs `quire distill` twice, measures acceptance over the held-out questions and
writes `demo/draft/` with its card. An interrupted run is resumed. Expect about 25 minutes on one
core.
"""

import argparse
import json
import shutil
from pathlib import Path

from demo import corpus
from demo.draft_card import write_card
from demo.evaluate import MODEL
from demo.heldout import FRESH_PATH, PATH
from tools.distill.acceptance import AcceptanceResult, compare_acceptance, measure
from tools.distill.run import distill
from tools.distill.settings import Phase, Settings, StudentShape

DRAFT = Path(__file__).with_name("draft")
WORK = Path(__file__).with_name("_work") / "draft"
# The first shard from which the corpus has all of its phrasings.
FIRST_SHARD, NUM_SHARDS = 22, 16
STEPS = 3000
NUM_DRAFTS = 4
# Conversations in the corpus's own phrasings that neither the demo model nor a student has read.
UNREAD_SHARD, NUM_UNREAD = 60, 1000
# Two layers: with one it cannot copy, since finding what followed an earlier occurrence of a word
# takes one layer to tell each token its predecessor and another to look it up. The width is what
# fits in 1 MB.
SHAPE = StudentShape(layers=2, hidden=96, intermediate=256, heads=3, kv_heads=1, head_dim=32)
WEIGHTS = {"distilled": {"kl": 1.0, "hard": 0.0}, "labels": {"kl": 0.0, "hard": 1.0}}
_FILES = ("config.json", "generation_config.json", "model.safetensors", "curves.svg")


def build(folder: Path, work: Path, steps: int) -> dict:
    """Make the draft model in `folder`; returns the content of distill.json."""
    data = work / "corpus.jsonl"
    write_corpus(data)
    record: dict = {}
    asked = (PATH, FRESH_PATH, write_unread(work / "unread.jsonl"))
    found: dict[str, list[AcceptanceResult]] = {questions.stem: [] for questions in asked}
    for name in WEIGHTS:
        record[name] = distill(settings(name, work / name, data, steps)) | {"acceptance": {}}
        del record[name]["out"]
        for questions in asked:
            one = measure(str(MODEL), str(work / name), questions, NUM_DRAFTS)
            found[questions.stem].append(one)
            told = one.acceptance.as_json() | {"overlap": round(one.overlap, 4)}
            record[name]["acceptance"][questions.stem] = told
    record["lead"] = {stem: _lead(pair) for stem, pair in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copyfile(work / "distilled" / name, folder / name)
    text = json.dumps(record, indent=2) + "\n"
    (folder / "distill.json").write_text(text, encoding="utf-8")
    write_card(folder, record)
    return record


def settings(name: str, out: Path, data: Path, steps: int) -> Settings:
    """The settings of the named run; the two runs differ only in the weights of their losses."""
    phase = Phase(
        steps=steps, row_tokens=512, learning_rate=4e-3, end_rate=4e-5, **WEIGHTS[name]
    )  # fmt: skip
    return Settings(
        teacher=str(MODEL),
        out=out,
        data=(data,),
        shape=SHAPE,
        phases=(phase,),
        batch_rows=4,
        validate_every=250,
        save_every=250,
    )


def write_unread(path: Path) -> Path:
    """Write conversations of an unread shard, each up to its first answer, as JSONL."""
    rows = []
    for conversation in corpus.shard(UNREAD_SHARD):
        messages = conversation.get("messages", ())
        roles = [message["role"] for message in messages]
        if "assistant" in roles and len(rows) < NUM_UNREAD:
            told = {"messages": messages[: roles.index("assistant")]}
            told |= {key: conversation[key] for key in ("tools",) if conversation.get(key)}
            rows.append(json.dumps(told, ensure_ascii=False) + "\n")
    path.write_text("".join(rows), encoding="utf-8")
    return path


def _lead(pair: list[AcceptanceResult]) -> dict[str, float]:
    """The lead of the first of two students over the second on the same answers."""
    ours, theirs = (one.agreements for one in pair)
    difference, error = compare_acceptance(ours, theirs, NUM_DRAFTS)
    return {
        "answers": len(ours),
        "mean_accepted": round(difference, 3),
        "error": round(error, 3),
    }


def write_corpus(path: Path) -> None:
    """Write conversations of the demo model's own corpus as JSONL, unless the file exists."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for index in range(FIRST_SHARD, FIRST_SHARD + NUM_SHARDS):
            for conversation in corpus.shard(index):
                if "text" in conversation:
                    row = {"text": corpus.as_text(conversation)}
                else:
                    row = {k: conversation[k] for k in ("messages", "tools") if k in conversation}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DRAFT)
    parser.add_argument("--work", type=Path, default=WORK, help="checkpoints; safe to delete")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    print(json.dumps(build(args.out, args.work, args.steps)))


if __name__ == "__main__":
    main()
