"""How useful a draft model is: how many of its tokens the target model would have generated.

    python -m tools.distill.acceptance TARGET DRAFT questions.jsonl --drafts 4

The target answers each prompt greedily, and speculation is then simulated over its answer. The
first token comes from the prompt's own step. In each round after it, the draft model greedily
proposes K tokens. Those up to the first mismatch with the answer are accepted, and the target's own
token follows them. No actual drafting is needed: as long as proposals match, the draft model has
read nothing but the answer, so one forward pass over the answer yields all its greedy choices.
Proposals beyond an answer's end count as rejected, as in a server, which cannot know that the end
is near.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.distill.documents import read_text
from tools.distill.errors import DistillError
from tools.json_lines import numbered_lines

_ROWS = 32  # prompts of a batch


@dataclass(frozen=True)
class Acceptance:
    """Counts over all answers; `drafts` is K.

    rounds: drafting rounds. accepted: accepted draft tokens. full_rounds and full_accepted: the
    same for the rounds that began with at least K tokens of the answer left. num_agreed, of tokens:
    greedy choices of the draft model that match the answer. by_position: the number of rounds in
    which the 1st, 2nd, ... draft token was accepted.
    """

    drafts: int
    rounds: int
    accepted: int
    full_rounds: int
    full_accepted: int
    tokens: int
    num_agreed: int
    by_position: tuple[int, ...]

    @property
    def mean_accepted(self) -> float:
        """Accepted draft tokens per round, over all rounds."""
        return self.accepted / max(1, self.rounds)

    def as_json(self) -> dict[str, Any]:
        """The counts and the means derived from them."""
        return {
            "drafts": self.drafts,
            "rounds": self.rounds,
            "mean_accepted": round(self.mean_accepted, 3),
            "mean_accepted_in_full_rounds": round(self.full_accepted / max(1, self.full_rounds), 3),
            "tokens_a_step": round((self.accepted + self.rounds) / max(1, self.rounds), 3),
            "agreement": round(self.num_agreed / max(1, self.tokens), 4),
            "by_place": [round(taken / max(1, self.rounds), 3) for taken in self.by_position],
        }


def simulate_acceptance(agreements: list[list[bool]], drafts: int) -> Acceptance:
    """Simulate speculation.

    agreements: for each answer, whether the draft model's greedy choice for its 2nd, 3rd, ... token
    matches it (the first token comes from the prompt's own step).
    """
    rounds = accepted = full_rounds = full_accepted = 0
    by_place = [0] * drafts
    for agreed in agreements:
        at = 0
        while at < len(agreed):
            ahead = agreed[at : at + drafts]
            taken = next((i for i, good in enumerate(ahead) if not good), len(ahead))
            rounds += 1
            accepted += taken
            if len(ahead) == drafts:
                full_rounds += 1
                full_accepted += taken
            for place in range(taken):
                by_place[place] += 1
            at += taken + 1
    return Acceptance(
        drafts=drafts,
        rounds=rounds,
        accepted=accepted,
        full_rounds=full_rounds,
        full_accepted=full_accepted,
        tokens=sum(map(len, agreements)),
        num_agreed=sum(map(sum, agreements)),
        by_position=tuple(by_place),
    )


def compare_acceptance(
    first: list[list[bool]], second: list[list[bool]], drafts: int
) -> tuple[float, float]:
    """The lead of the first draft model in mean accepted tokens per round, and its standard error.

    The error is over the answers, paired. Each mean is a ratio of sums, accepted over rounds, so an
    answer's contribution is (accepted - mean * rounds) / (rounds per answer), of the first less
    that of the second: the ratio estimator's first-order variance (Cochran, "Sampling Techniques"
    1977, section 2.11).

    Args:
        first, second: agreements; at least two answers, the same in both.
        drafts: the number of tokens proposed at a time.
    """
    means, parts = [], []
    for told in (first, second):
        each = [simulate_acceptance([agreed], drafts) for agreed in told]
        mean = simulate_acceptance(told, drafts).mean_accepted
        rounds = sum(one.rounds for one in each) / len(each)
        means.append(mean)
        parts.append([(one.accepted - mean * one.rounds) / rounds for one in each])
    apart = [ours - theirs for ours, theirs in zip(*parts, strict=True)]  # the sum is 0
    number = len(apart)
    variance = sum(value**2 for value in apart) / (number - 1)
    return means[0] - means[1], math.sqrt(variance / number)


@torch.no_grad()
def agreements(draft: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[list[bool]]:
    """For each answer, whether the draft model would have chosen its 2nd, 3rd, ... token."""
    results = []
    for prompt, answer in zip(prompts, answers, strict=True):
        choices = _logits(draft, prompt, answer).argmax(-1).tolist()
        results.append([ours == theirs for ours, theirs in zip(choices, answer[1:], strict=True)])
    return results


@torch.no_grad()
def overlap(target: Any, draft: Any, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """The mean over the answers' tokens of sum(min(p, q)) over the vocabulary, at temperature 1.

    This is the probability that rejection sampling accepts a draft token there (Leviathan et al.
    2023, section 3.2).
    """
    total, tokens = 0.0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        p, q = (torch.softmax(_logits(m, prompt, answer), -1) for m in (target, draft))
        total += torch.minimum(p, q).sum().item()
        tokens += len(answer) - 1
    return total / max(1, tokens)


def _logits(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[len(answer) - 1, vocab] float32, the logits for the 2nd, 3rd, ... token of the answer."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *answer]], device=device)
    return model(ids, use_cache=False).logits[0, len(prompt) : -1].float()


class AcceptanceResult(NamedTuple):
    """The results for a draft model over some questions; see the functions of these names."""

    acceptance: Acceptance
    overlap: float
    agreements: list[list[bool]]


def measure(
    target: str, draft: str, questions: Path, drafts: int = 4, max_new_tokens: int = 160
) -> AcceptanceResult:
    """Measure acceptance and :func:`overlap` over the prompts of a JSONL file.

    Its lines are {"messages": [...]} or {"prompt": ...}. Both models run in float32. Raises
    DistillError.
    """
    from tools.distill import models

    tokenizer = models.load_tokenizer(target)
    device = models.pick_device("auto")
    teacher, student = (
        models.load_model(folder, torch.float32, device, eager_attention=False).eval()
        for folder in (target, draft)
    )
    models.check_vocabularies(teacher.config, student.config, (target, Path(draft)))
    prompts = read_prompts(questions, tokenizer)
    answers = generate_answers(teacher, tokenizer, prompts, max_new_tokens)
    agreed = agreements(student, prompts, answers)
    shared = overlap(teacher, student, prompts, answers)
    return AcceptanceResult(simulate_acceptance(agreed, drafts), shared, agreed)


def generate_answers(
    model: Any, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Greedy answers as token ids, including the end token."""
    from tools.distill.generation import continue_prompts
    from tools.distill.settings import Generation

    asked = Generation(max_new_tokens=max_new_tokens, temperature=0.0)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    said: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), _ROWS):
        chunk = order[first : first + _ROWS]
        written = continue_prompts(asked, model, tokenizer, [prompts[i] for i in chunk])
        for i, text in zip(chunk, written, strict=True):
            said[i] = text
    return said


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """The prompts of a JSONL file as token ids. Raises DistillError, naming the line."""
    prompts = []
    for number, line in numbered_lines(read_text(path)):
        try:
            row = json.loads(line)
            text = row.get("prompt") or tokenizer.apply_chat_template(
                row["messages"], tools=row.get("tools"), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template may raise anything
            raise DistillError(f"{path}: line {number}: no prompt or messages ({error})") from None
        prompts.append(tokenizer(text, add_special_tokens="prompt" in row)["input_ids"])
    return prompts


def main() -> int:
    """Print the result as one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="the model that decides, a directory")
    parser.add_argument("draft", help="the model that proposes, a directory")
    parser.add_argument(
        "questions", type=Path, help='JSONL of {"messages": ...} or {"prompt": ...}'
    )
    parser.add_argument("--drafts", type=int, default=4, help="tokens proposed at a time")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="of an answer")
    args = parser.parse_args()
    try:
        found, shared, _ = measure(
            args.target, args.draft, args.questions, args.drafts, args.max_new_tokens
        )
    except DistillError as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found.as_json() | {"overlap": round(shared, 4)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
