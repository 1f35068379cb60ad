"""The held-out evaluation: greedy answers that must be exactly right.

    python -m demo.evaluate           # prints one JSON line

`load_heldout` and `score` need neither torch nor transformers, so any engine can use them.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from demo.heldout import PATH
from demo.template import render

MODEL = Path(__file__).with_name("model")
MAX_NEW_TOKENS = 160
_ROWS = 25  # prompts of a batch


def load_heldout(path: Path = PATH) -> list[dict]:
    """The evaluation entries: `id`, `category`, `messages`, `expected`, and `tools` if any."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def score(expected: str, answer: str) -> bool:
    """Whether the answer is exactly the expected text, ignoring outer whitespace."""
    return answer.strip() == expected.strip()


def prompt(entry: dict) -> str:
    """The rendered prompt of an entry, up to the start of the answer."""
    return render(entry["messages"], entry.get("tools"), add_generation_prompt=True)


def evaluate(answer: Callable[[list[str]], list[str]], entries: list[dict]) -> dict:
    """Run all prompts through `answer` and score them.

    Returns `right`, `total`, `accuracy` (0 to 1), `categories` as name -> [right, total], and
    `failures` as dicts of id, expected and answer.
    """
    answers = answer([prompt(entry) for entry in entries])
    categories: dict[str, list[int]] = {}
    failures = []
    for entry, said in zip(entries, answers, strict=True):
        good = score(entry["expected"], said)
        counts = categories.setdefault(entry["category"], [0, 0])
        counts[0] += good
        counts[1] += 1
        if not good:
            asked = entry["messages"][-1]["content"]
            failures.append({"id": entry["id"], "asked": asked, "answer": said} | _pick(entry))
    right = len(entries) - len(failures)
    return {
        "right": right,
        "total": len(entries),
        "accuracy": right / len(entries),
        "categories": categories,
        "failures": failures,
    }


def transformers_answers(folder: Path) -> Callable[[list[str]], list[str]]:
    """Greedy answers by transformers' `generate`, in float32, some prompts at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(prompts: list[str]) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        said = [""] * len(prompts)
        for start in range(0, len(order), _ROWS):
            chunk = order[start : start + _ROWS]
            batch = tokenizer([prompts[i] for i in chunk], return_tensors="pt", padding=True)
            batch.pop("token_type_ids", None)
            with torch.inference_mode():
                ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            new = ids[:, batch["input_ids"].shape[1] :]
            for i, row in zip(chunk, new, strict=True):
                said[i] = tokenizer.decode(row, skip_special_tokens=True)
        return said

    return answer


def _pick(entry: dict) -> dict:
    return {"category": entry["category"], "expected": entry["expected"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    args = parser.parse_args()
    result = evaluate(transformers_answers(args.model), load_heldout())
    for failure in result.pop("failures"):
        print(json.dumps(failure, ensure_ascii=False))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
