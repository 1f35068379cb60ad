"""Builds the committed model from scratch.

    python -m demo.build

Writes the tokenizer, trains, exports, evaluates on the reserved phrasings and writes the model
card. An interrupted run is resumed. Expect about 70 minutes on one core.
"""

import argparse
import json
from pathlib import Path

from demo.card import write_card
from demo.evaluate import MODEL, evaluate, load_heldout, transformers_answers
from demo.heldout import FRESH_PATH
from demo.train import NUM_SHARDS, WORK, train


def build(folder: Path, work: Path, num_shards: int, threads: int) -> dict:
    """Build the model in `folder`, checkpoints in `work`; returns the content of training.json."""
    import torch

    torch.set_num_threads(threads)
    record = train(folder, work, num_shards)
    return finish(folder, record)


def finish(folder: Path, record: dict) -> dict:
    """Evaluate the exported model, and write training.json and the card."""
    answer = transformers_answers(folder)
    result = evaluate(answer, load_heldout())
    fresh = evaluate(answer, load_heldout(FRESH_PATH))
    for counted in (result, fresh):
        counted["failures"] = [failure["id"] for failure in counted["failures"]]
    record = record | {"evaluation": result, "fresh": fresh}
    text = json.dumps(record, indent=2) + "\n"
    (folder / "training.json").write_text(text, encoding="utf-8")
    write_card(folder, record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--work", type=Path, default=WORK, help="checkpoints; safe to delete")
    parser.add_argument("--shards", type=int, default=NUM_SHARDS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(json.dumps(build(args.out, args.work, args.shards, args.threads)))


if __name__ == "__main__":
    main()
