"""Writes the draft's card from the record of its two runs, so that no number is typed by hand."""

import json
from pathlib import Path


def write_card(folder: Path, record: dict) -> None:
    """Write README.md into the draft model's folder; `record` is the content of distill.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(card(record, config), encoding="utf-8")


def card(record: dict, config: dict) -> str:
    """The card's Markdown."""
    ours, labels = record["distilled"], record["labels"]
    rows = "\n".join(
        _row(name, run, questions)
        for questions in record["lead"]
        for name, run in (("distilled", ours), ("labels alone", labels))
    )
    places = "\n".join(
        f"| {place} | {first:.1%} | {second:.1%} |"
        for place, (first, second) in enumerate(
            zip(*(run["acceptance"]["heldout"]["by_place"] for run in (ours, labels)), strict=True),
            1,
        )
    )
    leads = "\n".join(
        f"| {stem} | {told['answers']:,} | {told['mean_accepted']:+.3f} | {told['error']:.3f} |"
        for stem, told in record["lead"].items()
    )
    return _CARD.format(
        rows=rows,
        leads=leads,
        places=places,
        millions=ours["parameters"] / 1e6,
        kilobytes=ours["weights_bytes"] / 1e3,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
        steps=ours["steps"],
        tokens=ours["tokens"] / 1e6,
        learned=ours["learned_tokens"] / 1e6,
        documents=ours["documents"],
        minutes=ours["seconds"] / 60,
        label_minutes=labels["seconds"] / 60,
        threads=ours["threads"],
        dtype=ours["dtype"],
        kl=ours["validation"]["kl"],
        hard=ours["validation"]["hard"],
        label_kl=labels["validation"]["kl"],
        label_hard=labels["validation"]["hard"],
        agreement=ours["validation"]["agreement"],
        label_agreement=labels["validation"]["agreement"],
    )


def _row(name: str, run: dict, questions: str) -> str:
    found = run["acceptance"][questions]
    return (
        f"| {questions} | {name} | {found['mean_accepted']:.2f} of {found['drafts']} | "
        f"{found['mean_accepted_in_full_rounds']:.2f} | {found['tokens_a_step']:.2f} | "
        f"{found['agreement']:.1%} | {found['overlap']:.1%} | {found['rounds']} |"
    )


_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---

# The demo model's draft

A Llama of {millions:.2f} million parameters ({kilobytes:.0f} kB in bf16) that foresees what
[the demo model](../model/README.md) will say. It is a draft for speculative decoding and of no use
by itself: it proposes tokens, the demo model decides.

{layers} layers, hidden {hidden}, {heads} heads of {head_dim} with one KV head, ffn {ffn}, \
vocabulary {vocab}, tied embeddings.
The tokenizer is the demo model's and lies with it only.

## What it is worth

The demo model answers the questions of `tests/demo/heldout.jsonl` and `tests/demo/fresh.jsonl`,
whose phrasings neither of the two has read, and those of conversations of its corpus that neither
has read ("unread"), greedily. Speculation is then played through: an
answer's first token comes from the prompt's own step; in each round after it the draft proposes
4 tokens, those up to the first that is not the demo model's are accepted, and one of the demo
model's own follows. All rounds count, also the last of an answer, whose end cuts it short; "full
rounds" are those with 4 or more tokens still to come. "A step" are the tokens that a step of the
demo model yields; "foreseen" the answers' tokens that the draft would have chosen; "shared" what
its distribution there and the demo model's have in common at temperature 1, which is the chance
that a draft of sampled text is kept. Both students are the same but for what they learned from:
the teacher's distribution, or the corpus's own words.

| questions | student | accepted a round | in full rounds | a step | foreseen | shared | rounds |
|---|---|---|---|---|---|---|---|
{rows}

By how much the distilled one leads in tokens accepted a round, with the standard error of that over
the questions, answered by both (two of it are a lead that is hardly chance):

| questions | answers | lead | standard error |
|---|---|---|---|
{leads}

How often each of the 4 was accepted, of all rounds over the held-out questions:

| draft | distilled | labels alone |
|---|---|---|
{places}

On held-out documents of the corpus: KL from the teacher {kl:.3f} nats (labels alone:
{label_kl:.3f}), cross-entropy with the text {hard:.3f} ({label_hard:.3f}), the same likeliest token
{agreement:.1%} ({label_agreement:.1%}).

The two are close, as they must be: the labels are the text that the demo model itself was taught
with and mostly says again. Where it would say something else, only its distribution tells: at
tokens that are nearly even choices, of which the held-out and the unread questions have many and
the fresh ones, with short plain answers, hardly any.

## How it was made

    python -m demo.draft

It writes {documents:,} conversations of the demo model's own seeded corpus and runs `quire distill`
([docs/distillation.md](../../docs/distillation.md)) twice: KL at temperature 1, and cross-entropy
alone. {steps:,} AdamW steps on packed rows, {tokens:.1f} million tokens, of which {learned:.1f}
million belong to answers and are learned; {dtype} products, float32 weights; the embedding begins
as the teacher's along the directions in which that varies most. {minutes:.0f} and
{label_minutes:.0f} minutes with {threads} thread(s) on a shared two-core CPU. No text, weight or
output of anybody else's model went in.

| file | what |
|---|---|
| `config.json`, `generation_config.json`, `model.safetensors` | the model |
| `distill.json` | the record of both runs, which this card is written from |
| `curves.svg` | losses and validations of the distillation |
"""
