"""The corpus is a function of its seed, and contains nothing of the evaluation set."""

import hashlib
import random
import re
from collections.abc import Iterable, Iterator

import pytest

from demo import corpus, followups, heldout, late_phrasings
from demo.batches import answer_mask
from demo.conversations import HELD_OUT, TRAIN, fill
from demo.evaluate import MODEL, load_heldout, prompt, score
from demo.phrasings import expand
from demo.relations import sample
from demo.staged_random import StagedRandom
from demo.tokenizer import IM_END, load_tokenizer
from demo.train import NUM_SHARDS

# One shard of each stage of the text on which the committed weights were trained. A change here
# requires a new training run.
DIGESTS = {
    0: "836b1e3bf7ac0369",
    8: "f21fc4cec37b632a",
    10: "195fd2c4211065e8",
    17: "c1044e1255749b95",
    22: "1e7820fb204a73d2",
    32: "7338dc513f1a1dfe",
}


@pytest.mark.slow
@pytest.mark.parametrize(("index", "sha256"), DIGESTS.items())
def test_the_corpus_is_the_one_that_was_trained_on(index: int, sha256: str) -> None:
    digest = hashlib.sha256()
    for conversation in corpus.shard(index):
        digest.update(corpus.as_text(conversation).encode())
    assert digest.hexdigest().startswith(sha256)


def test_another_seed_gives_another_corpus() -> None:
    assert corpus.shard(0, size=50) == corpus.shard(0, size=50)
    assert corpus.shard(0, size=50) != corpus.shard(1, size=50)
    assert corpus.shard(0, seed=1, size=50) != corpus.shard(0, seed=2, size=50)


def test_no_reserved_prompt_is_in_the_first_shards() -> None:
    assert leaked([0, corpus.STAGE_STARTS[-1]]) == set()


@pytest.mark.slow
def test_no_reserved_prompt_is_in_the_whole_corpus() -> None:
    assert leaked(range(NUM_SHARDS)) == set()


def test_the_committed_evaluation_set_is_the_one_we_would_write() -> None:
    assert heldout.build() == load_heldout()
    assert heldout.build_fresh() == load_heldout(heldout.FRESH_PATH)
    assert len({prompt(e) for e in load_heldout()}) == 300


def test_every_text_ends_and_opens_properly() -> None:
    for conversation in corpus.shard(3, size=300):
        text = corpus.as_text(conversation)
        assert "{" not in re.sub(r"\{\"|\": \{|\{\}", "", _without_json(text))
        assert text.endswith("<|endoftext|>" if "text" in conversation else "<|im_end|>\n")


def test_only_answers_are_learned() -> None:
    tokenizer = load_tokenizer(MODEL)
    opening = tokenizer.encode("<|im_start|>assistant\n").ids
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "assistant\nHi"},
        {"role": "assistant", "content": "Two."},
    ]
    ids = tokenizer.encode(corpus.as_text({"messages": messages})).ids
    learned = [i for i, learn in zip(ids, answer_mask(ids, opening), strict=True) if learn]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "One.<|im_end|>Two.<|im_end|>"
    assert learned[-1] == IM_END


@pytest.mark.parametrize("kind", sorted(TRAIN))
def test_every_template_finds_its_slots(kind: str) -> None:
    dice = StagedRandom.seeded(kind, 4)
    templates = [
        *TRAIN[kind],
        *HELD_OUT[kind],
        *late_phrasings.TRAIN.get(kind, []),
        *late_phrasings.CLOSING.get(kind, []),
    ]
    templates += [*followups.FOLLOW_UPS.get(kind, []), *late_phrasings.FOLLOW_UPS.get(kind, [])]
    for template in templates * 3:
        text = fill(expand(template, dice), sample(kind, dice))
        assert text.strip()
        assert not set("(){}|") & set(text), template


def test_tool_calls_obey_their_schemas() -> None:
    num_calls = 0
    for conversation in corpus.shard(17, size=400):
        schemas = {t["function"]["name"]: t["function"] for t in conversation.get("tools", [])}
        for message in conversation.get("messages", []):
            for call in message.get("tool_calls", []):
                parameters = schemas[call["function"]["name"]]["parameters"]
                arguments = set(call["function"]["arguments"])
                assert arguments <= set(parameters["properties"])
                assert arguments >= set(parameters.get("required", []))
                num_calls += 1
    assert num_calls > 50


def test_choices_expand_from_the_inside() -> None:
    seen = {expand("(a|b) (c|)", random.Random(i)) for i in range(50)}
    assert seen == {"a", "b", "a c", "b c"}


@pytest.mark.parametrize(
    ("answer", "right"),
    [("Paris.", True), (" Paris.\n", True), ("paris.", False), ("Paris. Yes.", False), ("", False)],
)
def test_score_is_exact(answer: str, right: bool) -> None:
    assert score("Paris.", answer) is right


def leaked(shards: Iterable[int]) -> set[str]:
    """Reserved questions that occur, up to case and punctuation, in any user message."""
    entries = load_heldout() + load_heldout(heldout.FRESH_PATH)
    reserved = {_words(_last_question(entry)) for entry in entries}
    found: set[str] = set()
    for index in shards:
        texts = (t for c in corpus.shard(index) for t in _user_texts(c))
        everything = "\n".join(_words(t) for t in texts)
        found |= {question for question in reserved if question in everything}
    return found


def _user_texts(conversation: dict) -> Iterator[str]:
    for message in conversation.get("messages", ()):
        if message["role"] == "user":
            yield message["content"]


def _last_question(entry: dict) -> str:
    return [m["content"] for m in entry["messages"] if m["role"] == "user"][-1]


def _words(text: str) -> str:
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def _without_json(text: str) -> str:
    """The text without lines of JSON: any other brace is an unfilled slot."""
    return "\n".join(line for line in text.splitlines() if '"' not in line)
